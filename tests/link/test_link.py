"""The daemon's view: start, messages both ways, states, refusals, close."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from peerllm.link import LinkState, Urgency
from peerllm.link.signaling import Description, decode_body, encode_body
from peerllm.protocol import limits
from peerllm.protocol.errors import (
    LinkError,
    ModelMismatch,
    PeerAway,
    PeerllmError,
    ProtocolError,
    RoomClosed,
    VersionMismatch,
)
from tests.link.pair import SECONDS, Pair


def changing(**changes: Any) -> Callable[[bytes], bytes]:
    """A room that changes what descriptions say."""

    def change(data: bytes) -> bytes:
        body = decode_body(data)
        return encode_body(dataclasses.replace(body, **changes)) if isinstance(body, Description) else data

    return change


async def test_two_links_come_up_and_each_is_told_the_others_hello(pair: Pair) -> None:
    await pair.start()
    await pair.right.reaches(LinkState.UP)
    assert pair.left.hellos == [b"hello of right"]
    assert pair.right.hellos == [b"hello of left"]
    assert pair.left.states == [LinkState.ICE, LinkState.HELLO, LinkState.UP]
    assert pair.left.link.epoch == pair.right.link.epoch == 1
    assert pair.left.link.stats().path == "loopback"


@pytest.mark.parametrize("size", [0, 1, 16, 4_000, 16_384, 200_000, limits.MAX_MESSAGE_BYTES])
async def test_a_message_of_any_size_arrives_whole(pair: Pair, size: int) -> None:
    await pair.start()
    message = os.urandom(size)
    await pair.left.link.send(message)
    async with asyncio.timeout(SECONDS):
        assert await pair.right.link.receive() == message
        await pair.right.link.send(message, Urgency.BULK)
        assert await pair.left.link.receive() == message


@pytest.mark.parametrize("rate", [0.0, 20_000.0, 250_000.0, 2_500_000.0])
async def test_a_long_message_leaves_in_full_packets(pair: Pair, rate: float) -> None:
    await pair.start()
    transport = pair.left.link._current.transport  # type: ignore[union-attr]
    sender = transport._sctp._association.sender
    sender.window.train_rate = rate
    assert transport.slice_bytes % sender.payload_bytes == 0
    assert sender.payload_bytes <= transport.slice_bytes <= limits.MAX_SLICE_BYTES


async def test_a_peer_that_takes_only_64_kib_in_one_piece_gets_any_message_in_several(pair: Pair) -> None:
    pair.room.tamper = changing(max_message_bytes=65536)
    await pair.start()
    message = os.urandom(1_000_000)
    await pair.left.link.send(message)
    async with asyncio.timeout(SECONDS):
        assert await pair.right.link.receive() == message


async def test_a_peer_of_another_version_is_told_so(pair: Pair) -> None:
    pair.room.tamper = changing(oldest=7, newest=9)
    outcomes = await asyncio.gather(pair.left.link.start(), pair.right.link.start(), return_exceptions=True)
    assert all(isinstance(each, VersionMismatch) for each in outcomes)


async def test_a_longer_message_is_refused_before_it_is_sent(pair: Pair) -> None:
    await pair.start()
    with pytest.raises(ProtocolError, match="at most"):
        await pair.left.link.send(bytes(limits.MAX_MESSAGE_BYTES + 1))


async def test_messages_of_an_urgency_keep_their_order(pair: Pair) -> None:
    await pair.start()
    messages = [b"%d " % index * 700 for index in range(200)]

    async def send_all() -> None:
        for message in messages:
            await pair.left.link.send(message)

    async with asyncio.timeout(SECONDS):
        sending = asyncio.create_task(send_all())
        assert [await pair.right.link.receive() for _ in messages] == messages
        await sending


async def test_a_round_overtakes_a_prefill_that_was_sent_before_it(pair: Pair) -> None:
    await pair.start()
    for _ in range(3):
        await pair.left.link.send(bytes(limits.PREFILL_CHUNK_BYTES), Urgency.BULK)
    await pair.left.link.send(b"verdict", Urgency.ROUND)
    async with asyncio.timeout(SECONDS):
        received = [await pair.right.link.receive() for _ in range(4)]
    assert b"verdict" in received[:2]


async def test_a_sender_waits_while_the_other_side_does_not_process(pair: Pair) -> None:
    await pair.start()
    message = bytes(256 * 1024)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(16):
            await pair.left.link.send(message)
            sent += 1

    sending = asyncio.create_task(send_all())
    async with asyncio.timeout(SECONDS):
        await pair.right.link.receive()  # one was processed, and nobody takes the rest
        await pair.right.link.send(b"are you there")
        await pair.left.link.receive()
        assert sent * len(message) <= limits.MAX_UNPROCESSED_BYTES + len(message)
        for _ in range(15):
            await pair.right.link.receive()
        await sending
    assert sent == 16


async def test_pings_measure_the_added_round_trip() -> None:
    pair = Pair(added_rtt_ms=60)
    try:
        await pair.start()
        async with asyncio.timeout(SECONDS):
            while pair.left.link.stats().rtt_ms is None:
                await pair.right.link.send(b"tick")
                await pair.left.link.receive()
        rtt = pair.left.link.stats().rtt_ms
        assert rtt is not None
        assert rtt >= 59
    finally:
        await pair.close()


async def test_a_refused_hello_ends_both_starts_with_the_same_typed_error(pair: Pair) -> None:
    def refuse(body: bytes) -> None:
        raise ModelMismatch("the models differ in the tokenizer")

    pair.right.link._on_hello = refuse
    outcomes = await asyncio.gather(pair.left.link.start(), pair.right.link.start(), return_exceptions=True)
    assert isinstance(outcomes[1], ModelMismatch)
    # The controlling side is UP for the moment until it hears of it.
    await pair.left.reaches(LinkState.DOWN)
    with pytest.raises(PeerAway, match="differ in the tokenizer") as caught:
        await pair.left.link.receive()
    assert isinstance(caught.value.__cause__, ModelMismatch)


async def test_a_peer_with_another_session_key_is_not_spoken_to(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_START_SECONDS", 1.5)
    pair.room.keys = (b"a" * 32, b"b" * 32)
    outcomes = await asyncio.gather(pair.left.link.start(), pair.right.link.start(), return_exceptions=True)
    assert any(isinstance(each, ProtocolError) and "between the two" in each.message for each in outcomes)
    assert all(isinstance(each, PeerllmError) for each in outcomes)
    assert not pair.left.hellos
    assert not pair.right.hellos


async def test_another_dtls_certificate_than_the_sealed_one_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINK_START_SECONDS", 1.5)
    pair.room.tamper = changing(fingerprint=bytes(32))
    outcomes = await asyncio.gather(pair.left.link.start(), pair.right.link.start(), return_exceptions=True)
    assert all(isinstance(each, LinkError) for each in outcomes)


async def test_a_peer_that_never_answers_is_a_typed_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_START_SECONDS", 0.3)
    with pytest.raises(PeerAway):
        await pair.left.link.start()
    assert pair.left.link.state is LinkState.DOWN


@pytest.mark.parametrize("name", ["left", "right"])
async def test_a_place_that_is_gone_for_good_ends_a_start_at_once(pair: Pair, name: str) -> None:
    side = pair.left if name == "left" else pair.right
    starting = asyncio.create_task(side.link.start())
    await asyncio.sleep(0)
    pair.room.close(RoomClosed("another daemon took this one's place"))
    with pytest.raises(RoomClosed, match="took this one's place"):
        async with asyncio.timeout(limits.LINK_START_SECONDS / 2):
            await starting
    assert side.link.state is LinkState.DOWN


@pytest.mark.parametrize("name", ["left", "right"])
async def test_a_place_that_is_gone_for_good_ends_a_link_when_its_connection_is_lost_and_not_before(
    pair: Pair, name: str
) -> None:
    side, other = (pair.left, pair.right) if name == "left" else (pair.right, pair.left)
    await pair.start()
    await side.reaches(LinkState.UP)
    pair.room.close(RoomClosed("another daemon took this one's place"))
    await other.link.send(b"still here")
    async with asyncio.timeout(SECONDS):
        assert await side.link.receive() == b"still here"
    assert side.link.state is LinkState.UP
    connection = side.link._current
    assert connection is not None
    side.link._lost(connection, PeerAway("silent"))
    with pytest.raises(PeerAway, match="took this one's place") as caught:
        async with asyncio.timeout(SECONDS):  # not the two minutes for which a lost connection is sought
            await side.link.receive()
    assert isinstance(caught.value.__cause__, RoomClosed)


async def test_a_closed_link_wakes_whoever_waits(pair: Pair) -> None:
    await pair.start()
    receiving = asyncio.create_task(pair.left.link.receive())
    await asyncio.sleep(0)
    await pair.left.link.close()
    with pytest.raises(PeerAway):
        await receiving
    with pytest.raises(PeerAway):
        await pair.left.link.send(b"late")


async def test_a_callback_that_raises_harms_nobody(pair: Pair) -> None:
    def explode(state: LinkState) -> None:
        raise RuntimeError("a fault of the daemon's")

    pair.left.link.on_state = explode
    await pair.start()
    await pair.left.link.send(b"still here")
    async with asyncio.timeout(SECONDS):
        assert await pair.right.link.receive() == b"still here"


async def test_closing_in_the_middle_of_connecting_leaves_nothing_behind_and_takes_no_time() -> None:
    begun = time.monotonic()
    pair = Pair()
    await pair.start()
    took = time.monotonic() - begun
    await pair.close()
    stages: set[LinkState] = set()
    for index in range(100):
        pair = Pair()
        starting = asyncio.gather(pair.left.link.start(), pair.right.link.start(), return_exceptions=True)
        if index == 99:
            await starting
        elif index % 2:
            for _ in range(index):  # a little further each time: the first steps wait for nothing
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(took * index / 90)
        stages |= {pair.left.link.state, pair.right.link.state}
        begun = time.monotonic()
        async with asyncio.timeout(limits.LINK_CLOSE_SECONDS + 1):
            await pair.close()
        # A close that waits for its own bound has left something to end by itself.
        assert time.monotonic() - begun < limits.LINK_CLOSE_SECONDS * 0.8, (index, stages)
        async with asyncio.timeout(SECONDS):
            await starting
    assert {LinkState.SIGNALING, LinkState.ICE, LinkState.UP} <= stages


async def test_many_small_messages_a_second_do_not_pile_up() -> None:
    pair = Pair(added_rtt_ms=40)
    try:
        await pair.start()
        loop = asyncio.get_running_loop()
        took: list[float] = []

        async def echo() -> None:
            while True:
                await pair.right.link.send(await pair.right.link.receive())

        echoing = asyncio.create_task(echo())
        async with asyncio.timeout(SECONDS):
            for _ in range(60):
                begun = loop.time()
                await pair.left.link.send(bytes(200))
                await pair.left.link.receive()
                took.append(loop.time() - begun)
        echoing.cancel()
        # One round trip, in the end as in the beginning: two would be two each time. A machine that is busy makes some
        # of them longer, and acknowledgements late; no bound on those says anything of the link.
        assert max(min(took[:20]), min(took[20:40]), min(took[40:])) < 0.08
        assert pair.left.link.stats().retransmitted < 20
    finally:
        await pair.close()
