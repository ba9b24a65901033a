"""Attempts without sockets: their frames, changed in any way, give an error of ours and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, PeerllmError, ProtocolError
from peerllm.rooms import attempt as attempts
from peerllm.rooms import wire
from peerllm.rooms.attempt import Attempt
from peerllm.rooms.seated import SeatedPeer

ONE, TWO = X25519PrivateKey.generate(), X25519PrivateKey.generate()


def ends(sent: list[bytes]) -> tuple[Attempt, Attempt]:
    """Both ends after the handshake; what the first sends goes to `sent`."""
    beginning = attempts.Beginning(ONE, TWO.public_key(), 7, wire.VERSIONS)
    tag, frame, epoch, theirs = attempts.answer(TWO, ONE.public_key(), beginning.frame, wire.VERSIONS)
    assert (tag, epoch) == (beginning.tag, 7)
    ours = beginning.take_answer(frame[9:11], frame[11:])

    async def post(body: bytes) -> None:
        sent.append(body)

    return Attempt(tag, 7, ours, post), Attempt(tag, 7, theirs, post)


def take(attempt: Attempt, frame: bytes) -> tuple[int, bytes] | None:
    _, counter, sealed = wire.unpack_sealed(frame)
    return attempt.take(counter, frame[: len(frame) - len(sealed)], sealed)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_beginning_changed_anywhere_is_refused(data: st.DataObject) -> None:
    frame = bytearray(attempts.Beginning(ONE, TWO.public_key(), 7, wire.VERSIONS).frame)
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PeerllmError):
        attempts.answer(TWO, ONE.public_key(), bytes(frame), wire.VERSIONS)


@given(st.binary(max_size=200), st.sampled_from([wire.BEGIN, wire.ANSWER, wire.SEALED, wire.UNEQUAL, 0, 255]))
@settings(max_examples=300, deadline=None)
def test_any_frame_at_all_leaves_a_peer_alive(data: bytes, kind: int) -> None:
    async def feed() -> None:
        for identity, remote in ((ONE, TWO), (TWO, ONE)):
            peer = SeatedPeer(
                identity,
                remote.public_key().public_bytes_raw(),
                is_opener=True,
                signaling_url="ws://127.0.0.1",
            )
            try:
                answers = peer._take(bytes([kind]) + data)
            except ProtocolError:
                answers = []
            assert all(answer[0] == wire.UNEQUAL for answer in answers)
            assert peer._accepted is None

    asyncio.run(feed())


async def test_each_message_opens_once_and_in_its_place() -> None:
    sent: list[bytes] = []
    ours, theirs = ends(sent)
    for body in (b"one", b"two"):
        await ours.send(body)
    assert take(theirs, sent[0]) is None
    assert await theirs.receive() == b"one"
    with pytest.raises(ProtocolError, match="repeated"):
        take(theirs, sent[0])
    with pytest.raises(ProtocolError, match="repeated"):  # and nothing is believed after that
        await theirs.receive()


async def test_what_arrived_before_an_attempt_failed_can_still_be_read() -> None:
    sent: list[bytes] = []
    ours, theirs = ends(sent)
    await ours.send(b"one")
    take(theirs, sent[0])
    theirs.fail(PeerAway("gone"))
    assert await theirs.receive() == b"one"
    with pytest.raises(PeerAway):
        await theirs.receive()


async def test_the_header_is_sealed_too() -> None:
    sent: list[bytes] = []
    ours, theirs = ends(sent)
    await ours.send(b"one")
    _, counter, sealed = wire.unpack_sealed(sent[0])
    with pytest.raises(ProtocolError):
        theirs.take(counter, wire.sealed_header(b"another.", counter), sealed)


async def test_messages_that_nobody_reads_are_bounded() -> None:
    sent: list[bytes] = []
    ours, theirs = ends(sent)
    for _ in range(limits.MAX_QUEUED_SIGNALING + 1):
        await ours.send(b"x")
    with pytest.raises(ProtocolError, match="more signaling messages than are read"):
        for frame in sent:
            take(theirs, frame)


async def test_an_attempt_whose_message_was_lost_here_sends_no_more() -> None:
    async def broken(_: bytes) -> None:
        raise PeerAway("the connection broke")

    ours, _ = ends([])
    ours._post = broken
    for _ in range(2):
        with pytest.raises(PeerAway):
            await ours.send(b"x")
    assert ours._keys.sending.counter == 1
