"""A lost connection is not a lost peer: SUSPECT, replacements, epochs, the deadline. Times are a tenth of the real."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from peerllm.link import LinkState, aioice_private, liveness
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway
from tests.link.pair import SECONDS, Pair


class Wire:
    """Every datagram of the test's links passes here."""

    is_cut = False


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    state = Wire()
    real = aioice_private.IceProtocol.datagram_received

    def pass_on(self: Any, data: bytes, addr: Any) -> None:
        if not state.is_cut:
            real(self, data, addr)

    monkeypatch.setattr(aioice_private.IceProtocol, "datagram_received", pass_on)
    monkeypatch.setattr(limits, "PING_SECONDS", 0.1)
    monkeypatch.setattr(limits, "SUSPECT_SECONDS", 0.3)
    monkeypatch.setattr(limits, "DOWN_SECONDS", 1.0)
    monkeypatch.setattr(limits, "REPLACEMENT_SECONDS", 0.1)
    monkeypatch.setattr(limits, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "TICK_SECONDS", 0.03)
    return state


@pytest_asyncio.fixture
async def up(wire: Wire) -> AsyncIterator[Pair]:
    pair = Pair(kept_seconds=30.0)
    try:
        await pair.start()
        await pair.right.reaches(LinkState.UP)
        yield pair
    finally:
        wire.is_cut = False
        await pair.close()


async def both_lost(pair: Pair) -> None:
    """The old connections are given up on both sides."""
    for side in (pair.left, pair.right):
        await side.until(lambda side=side: side.link._current is None)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_short_cut_is_suspect_and_then_up_again(wire: Wire, up: Pair) -> None:
    wire.is_cut = True
    await asyncio.gather(up.left.reaches(LinkState.SUSPECT), up.right.reaches(LinkState.SUSPECT))
    wire.is_cut = False
    await asyncio.gather(up.left.reaches(LinkState.UP), up.right.reaches(LinkState.UP))
    await up.left.link.send(b"after")
    async with asyncio.timeout(SECONDS):
        assert await up.right.link.receive() == b"after"


async def test_a_cut_beyond_down_gives_a_new_epoch_and_both_hellos_again(wire: Wire, up: Pair) -> None:
    wire.is_cut = True
    await asyncio.gather(up.left.reaches(LinkState.SUSPECT), up.right.reaches(LinkState.SUSPECT))
    await both_lost(up)
    wire.is_cut = False
    await asyncio.gather(up.left.reaches(LinkState.UP), up.right.reaches(LinkState.UP))
    assert up.left.link.epoch == up.right.link.epoch > 1
    assert up.left.hellos == [b"hello of right"] * 2
    assert up.right.hellos == [b"hello of left"] * 2
    assert LinkState.DOWN not in up.left.states + up.right.states
    assert up.left.states[-2:] == [LinkState.SUSPECT, LinkState.UP]
    assert up.room.suspicions >= 2


async def test_messages_of_a_lost_epoch_are_gone_and_a_waiting_sender_goes_on_in_the_next(wire: Wire, up: Pair) -> None:
    wire.is_cut = True
    await up.left.link.send(b"lost")
    await asyncio.gather(up.left.reaches(LinkState.SUSPECT), up.right.reaches(LinkState.SUSPECT))
    waiting = asyncio.create_task(up.left.link.send(b"waited"))
    await both_lost(up)
    assert not waiting.done()
    wire.is_cut = False
    async with asyncio.timeout(SECONDS):
        await waiting
        assert await up.right.link.receive() == b"waited"


async def test_past_the_deadline_both_links_are_down_for_good_with_a_typed_error(wire: Wire) -> None:
    pair = Pair(kept_seconds=0.5)
    try:
        await pair.start()
        await pair.right.reaches(LinkState.UP)
        wire.is_cut = True
        pair.room.is_reachable = False
        outcomes = await asyncio.gather(pair.left.link.receive(), pair.right.link.receive(), return_exceptions=True)
        assert all(isinstance(each, PeerAway) and "did not come back" in each.message for each in outcomes)
        assert pair.left.link.state is pair.right.link.state is LinkState.DOWN
    finally:
        await pair.close()


async def test_the_room_may_be_away_for_a_part_of_the_cut(wire: Wire, up: Pair) -> None:
    wire.is_cut = True
    up.room.is_reachable = False
    await asyncio.gather(up.left.reaches(LinkState.SUSPECT), up.right.reaches(LinkState.SUSPECT))
    await both_lost(up)
    wire.is_cut = False
    up.room.is_reachable = True
    await asyncio.gather(up.left.reaches(LinkState.UP), up.right.reaches(LinkState.UP))


async def test_a_controlled_peer_that_was_started_anew_is_taken_back(wire: Wire, up: Pair) -> None:
    await up.right.link.close()
    reborn = up.make_side("right")
    try:
        await reborn.link.start()
        await up.left.reaches(LinkState.UP)
        assert up.left.link.epoch == reborn.link.epoch > 1
        await reborn.link.send(b"reborn")
        async with asyncio.timeout(SECONDS):
            assert await up.left.link.receive() == b"reborn"
    finally:
        await reborn.link.close()


async def test_a_controlling_peer_that_was_started_anew_learns_the_epoch(wire: Wire, up: Pair) -> None:
    up.right.link._epoch = 7  # as after six reconnects
    await up.left.link.close()
    reborn = up.make_side("left")
    try:
        await reborn.link.start()
        await up.right.reaches(LinkState.UP)
        assert up.right.link.epoch == reborn.link.epoch == 8
    finally:
        await reborn.link.close()


async def test_a_change_of_addresses_is_suspect_at_once_and_ends_when_the_old_path_still_answers(
    wire: Wire, up: Pair
) -> None:
    up.left.link._sign_seen("addresses")
    assert up.left.link.state is LinkState.SUSPECT
    await up.left.reaches(LinkState.UP)


async def test_the_controlled_side_asks_for_a_new_attempt_when_its_address_changed(wire: Wire, up: Pair) -> None:
    wire.is_cut = True
    up.room.has_begun.clear()
    up.right.link._sign_seen("addresses")
    await up.left.reaches(LinkState.SUSPECT)
    async with asyncio.timeout(SECONDS):
        await up.room.has_begun.wait()
    wire.is_cut = False
    await asyncio.gather(up.left.reaches(LinkState.UP), up.right.reaches(LinkState.UP))


async def test_a_path_that_takes_longer_to_make_than_several_attempts_are_apart_is_made_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLACEMENT_SECONDS", 0.4)
    pair = Pair(kept_seconds=60.0, added_rtt_ms=400.0)  # seven round trips from an attempt's begin to UP
    try:
        await pair.start()
        await pair.right.reaches(LinkState.UP)
        assert pair.right.link._current is not None
        pair.right.link._current._fail(PeerAway("made up by the test"))
        async with asyncio.timeout(2 * SECONDS):
            while not pair.left.link.epoch == pair.right.link.epoch > 1:
                await pair.right.link._changes.next()
        await pair.right.reaches(LinkState.UP)
    finally:
        await pair.close()


@pytest.mark.timeout(20)
async def test_attempts_that_follow_at_once_leave_others_their_turn(up: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLACEMENT_SECONDS", 0.0)
    up.room.is_reachable = False
    up.left.link._wanted.set()
    for _ in range(50):
        await asyncio.sleep(0)
    up.left.link._wanted.clear()


@pytest.mark.timeout(300)
async def test_many_reconnects_leave_tasks_descriptors_and_memory_where_they_were(
    wire: Wire, up: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reconnect() -> None:
        # One attempt for each, at once: a busy machine that computes several at a time completes none.
        monkeypatch.setattr(limits, "REPLACEMENT_SECONDS", 0.0)
        up.left.link._changes.happened()
        for _ in range(3):
            await asyncio.sleep(0)
        monkeypatch.setattr(limits, "REPLACEMENT_SECONDS", 1.0)
        before = up.left.link.epoch
        assert up.right.link._current is not None
        up.right.link._current._fail(PeerAway("made up by the test"))
        await up.left.until(lambda: up.left.link.epoch > before)
        await up.right.until(lambda: up.right.link.epoch == up.left.link.epoch)
        await asyncio.gather(up.left.reaches(LinkState.UP), up.right.reaches(LinkState.UP))
        await asyncio.gather(*up.left.link._closing, *up.right.link._closing, return_exceptions=True)

    tracemalloc.start()
    try:
        for _ in range(5):
            await reconnect()
        gc.collect()
        tasks, descriptors = len(asyncio.all_tasks()), open_descriptors()
        memory, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            await reconnect()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(asyncio.all_tasks()) <= tasks + 2
    assert open_descriptors() <= descriptors + 2
    assert after - memory < 256 * 1024
