"""What `peerllm doctor` measures over a link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from peerllm.link import aioice_private, bench
from peerllm.protocol.errors import PeerAway
from tests.link.pair import SECONDS, Pair


@pytest_asyncio.fixture
async def served(pair: Pair) -> AsyncIterator[Pair]:
    """The right side serves, until it is told that all is done."""
    await pair.start()

    async def serve() -> None:
        await bench.serve(pair.right.link)
        await pair.right.link.close()

    serving = asyncio.create_task(serve())
    yield pair
    await bench.finish(pair.left.link)
    async with asyncio.timeout(SECONDS):
        await serving


async def test_a_clean_path_loses_nothing_in_either_direction(served: Pair) -> None:
    async with asyncio.timeout(SECONDS):
        loss = await bench.measure_loss(served.left.link, seconds=0.5)
    assert loss is not None
    assert (loss.out, loss.into) == (0.0, 0.0)
    assert len(loss.took_ms) == 25


async def test_what_is_lost_on_the_way_out_is_told_from_what_is_lost_on_the_way_in(
    served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, chance = aioice_private.IceProtocol.datagram_received, random.Random(4)
    right = served.right.link._current.transport._connection  # type: ignore[union-attr]

    def lossy(self: Any, data: bytes, addr: Any) -> None:
        if self._connection is not right or chance.random() > 0.3:
            real(self, data, addr)

    monkeypatch.setattr(aioice_private.IceProtocol, "datagram_received", lossy)
    async with asyncio.timeout(SECONDS):
        loss = await bench.measure_loss(served.left.link, seconds=1.0)
    assert loss is not None
    assert 0.1 < loss.out < 0.6
    assert loss.into < 0.1


async def test_a_connection_that_was_replaced_meanwhile_gives_no_share(served: Pair) -> None:
    async with asyncio.timeout(SECONDS):
        measuring = asyncio.create_task(bench.measure_loss(served.left.link, seconds=0.5))
        await asyncio.sleep(0.2)
        served.left.link._epoch += 1
        try:
            assert await measuring is None
        finally:
            served.left.link._epoch -= 1


async def test_throughput_is_measured_in_both_directions_in_the_time_that_was_given(served: Pair) -> None:
    async with asyncio.timeout(SECONDS):
        out, into = await bench.measure_throughput(served.left.link, seconds=0.4)
    assert min(out, into) > 100_000


async def test_a_flood_that_nobody_confirms_stays_small(pair: Pair) -> None:
    await pair.start()
    flood = bench.Flood(pair.left.link)
    await flood.run(0.2)
    taken = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            while True:
                taken += len(await pair.right.link.receive())
    assert 0 < taken <= 128_000


async def test_a_flood_is_asked_for_no_longer_than_the_limit(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MAX_FLOOD_SECONDS", 0.0)
    async with asyncio.timeout(SECONDS):
        assert await bench._flood_in(served.left.link, 0.3) == 0.0


async def test_a_server_whose_peer_goes_in_the_middle_of_a_flood_leaves_nothing_behind(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    await pair.left.link.send(bench._message(bench._FLOOD, 0, 5_000))
    async with asyncio.timeout(SECONDS):
        await pair.left.link.receive()
        await pair.right.link.close()
        with pytest.raises(PeerAway):
            await serving


async def test_being_told_that_all_is_done_ends_a_flood_at_once(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    await pair.left.link.send(bench._message(bench._FLOOD, 0, 10_000))
    async with asyncio.timeout(6):
        await pair.left.link.receive()
        await bench.finish(pair.left.link)
        await serving
