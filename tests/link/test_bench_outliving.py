"""What a measurement does when the connection is replaced under it, or when the other side leaves or lies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peerllm.link import LinkState, bench
from peerllm.protocol import limits
from peerllm.protocol.errors import LinkError, PeerAway, PeerllmError, ProtocolError
from tests.link.pair import SECONDS, Pair

_HUGE = 2**64 - 1


async def said(pair: Pair, *messages: bytes) -> PeerllmError | None:
    """What `serve` ends with, when the other side sends these and then says that all is done."""
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    for each in messages:
        await pair.left.link.send(each)
    await bench.finish(pair.left.link)
    async with asyncio.timeout(SECONDS):
        (ended,) = await asyncio.gather(serving, return_exceptions=True)
    assert ended is None or isinstance(ended, PeerllmError), ended
    return ended


async def replace(pair: Pair) -> None:
    """Both sides lose the connection at once, and find another."""
    epoch = pair.left.link.epoch
    for side in (pair.left, pair.right):
        connection = side.link._current
        assert connection is not None
        connection._fail(PeerAway("cut"))
    for side in (pair.left, pair.right):
        await side.until(lambda side=side: side.link.epoch > epoch)


async def test_sizes_that_are_said_and_not_sent_count_nothing(pair: Pair) -> None:
    bulk = (bench._message(bench._BULK, 0, _HUGE), bench._message(bench._BULK, 1, _HUGE))
    assert await said(pair, *bulk) is None


@pytest.mark.parametrize(
    "message",
    [b"x", bench._message(200, 0), bench._message(bench._ASK, 0, _HUGE)],
    ids=["short", "unknown", "too long a block"],
)
async def test_what_is_no_message_of_the_bench_is_a_protocol_error(pair: Pair, message: bytes) -> None:
    assert isinstance(await said(pair, message), ProtocolError)


async def test_a_flood_in_counts_what_came(pair: Pair) -> None:
    await pair.start()
    for number in range(3):
        await pair.right.link.send(bench._message(bench._BULK, number, _HUGE))
    async with asyncio.timeout(SECONDS):
        assert await bench._flood_in(pair.left.link, 0.3) < 1e8


@pytest.mark.parametrize(("number", "length"), [(0, 16), (77, 100)], ids=["wrong length", "never the right one"])
async def test_answers_that_nobody_asked_for_end_it(
    pair: Pair, number: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_MAX_LATE", 5)
    await pair.start()
    for _ in range(10):
        await pair.right.link.send(bench._message(bench._BLOCK, number, length=length))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ProtocolError):
            await bench._exchange(pair.left.link, bench._ASK, 0, 100)


async def test_a_block_is_asked_for_again_over_the_new_connection(pair: Pair) -> None:
    """The first question is taken by nobody: what the old connection carried is gone."""
    await pair.start()
    asking = asyncio.create_task(bench._exchange(pair.left.link, bench._ECHO, 5, 1_000))
    async with asyncio.timeout(SECONDS):
        await pair.right.link.receive()
        await replace(pair)
        serving = asyncio.create_task(bench.serve(pair.right.link))
        assert await asking > 0
        await bench.finish(pair.left.link)
        await serving


@pytest.mark.parametrize("direction", [bench._flood_out, bench._flood_in], ids=["out", "in"])
async def test_a_flood_that_was_cut_says_so_and_the_next_is_whole(pair: Pair, direction: Any) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    async with asyncio.timeout(SECONDS):
        flooding = asyncio.create_task(direction(pair.left.link, 3.0))
        await asyncio.sleep(0.2)
        await replace(pair)
        with pytest.raises(bench.Replaced):
            await flooding
        assert await direction(pair.left.link, 0.4) > 100_000
        await bench.finish(pair.left.link)
        await serving


async def test_loss_is_not_waited_for_on_a_connection_that_is_gone(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    async with asyncio.timeout(SECONDS):
        measuring = asyncio.create_task(bench.measure_loss(pair.left.link, seconds=0.6))
        await asyncio.sleep(0.2)
        await replace(pair)
        assert await measuring is None
        await bench.finish(pair.left.link)
        await serving


async def test_silence_on_a_link_that_is_up_ends_both_sides(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "EXCHANGE_SECONDS", 0.3)
    await pair.start()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(LinkError, match="nothing came over it"):
            await bench.measure(pair.left.link, sizes=[16], samples=1)
        await pair.right.link.receive()
        with pytest.raises(LinkError, match="nothing came over it"):
            await bench.serve(pair.right.link, patience=0.3)
    assert pair.left.link.state is LinkState.UP


async def test_who_leaves_tells_the_side_that_serves(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    async with asyncio.timeout(bench.LEAVE_SECONDS):
        await bench.leave(pair.left.link)
    with pytest.raises(PeerAway, match="before all was measured"):
        await serving


async def test_who_leaves_tells_the_side_that_measures(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    measuring = asyncio.create_task(bench.measure(pair.left.link, sizes=[16], samples=100_000))
    async with asyncio.timeout(SECONDS):
        await asyncio.sleep(0.1)
        serving.cancel()
        await asyncio.wait([serving])
        leaving = asyncio.create_task(bench.leave(pair.right.link))
        with pytest.raises(PeerAway, match="before all was measured"):
            await measuring
        await bench.leave(pair.left.link)
        await leaving


async def test_leaving_a_side_that_says_nothing_takes_no_longer_than_its_limit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(limits, "LINK_CLOSE_SECONDS", 0.2)
    await pair.start()
    async with asyncio.timeout(2):
        await bench.leave(pair.left.link)
        await bench.finish(pair.left.link)


async def test_how_a_link_ends_after_a_goodbye_is_no_news(pair: Pair) -> None:
    await pair.start()
    serving = asyncio.create_task(bench.serve(pair.right.link))
    await bench.leave(pair.left.link)
    with pytest.raises(bench.Left):
        await serving
    await pair.right.link.close()
    assert LinkState.SUSPECT not in pair.left.states
