"""Frames, and the two boxes that cut and join messages."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerllm.link import frames
from peerllm.link.config import Urgency
from peerllm.link.frames import Frame, Kind
from peerllm.link.inbox import Inbox
from peerllm.link.outbox import Outbox, cost
from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError


def data(urgency: Urgency, message_id: int, offset: int, total: int, piece: bytes) -> Frame:
    frame = frames.decode(frames.encode_data(urgency, 1, message_id, offset, total, piece))
    assert frame is not None
    return frame


def drain(outbox: Outbox) -> list[bytes]:
    return list(iter(outbox.next_slice, None))


def test_a_frame_comes_back_as_it_went() -> None:
    assert frames.decode(frames.encode_control(Kind.PING, 7, b"now")) == Frame(Kind.PING, Urgency.CONTROL, 7, b"now")
    assert data(Urgency.BULK, 3, 10, 20, b"piece") == Frame(Kind.DATA, Urgency.BULK, 1, b"piece", 3, 10, 20)


def test_a_frame_of_a_later_release_is_passed_over() -> None:
    assert frames.decode(b"\xc8" + bytes(10)) is None


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\0" * 5,
        bytes(limits.MAX_SLICE_BYTES + 1),
        b"\x05\x09" + bytes(4),  # an urgency that is none
        bytes(10),  # DATA without its header
        frames.encode_data(Urgency.ROUND, 1, 0, 0, limits.MAX_MESSAGE_BYTES + 1, b"x"),
        frames.encode_data(Urgency.ROUND, 1, 0, 8, 10, b"xyz"),
        frames.encode_data(Urgency.ROUND, 1, 0, 0, 10, b""),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode(wire)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_frame_or_a_protocol_error(wire: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        frames.decode(wire)


@given(st.lists(st.tuples(st.sampled_from(Urgency), st.integers(0, 50_000)), max_size=12), st.randoms())
def test_messages_survive_any_reordering_of_their_slices(
    sizes: list[tuple[Urgency, int]], shuffle: random.Random
) -> None:
    outbox, inbox = Outbox(1), Inbox()
    sent: dict[Urgency, list[bytes]] = {urgency: [] for urgency in Urgency}
    for index, (urgency, size) in enumerate(sizes):
        message = bytes([index]) * size
        sent[urgency].append(message)
        outbox.put(message, urgency)
    slices = drain(outbox)
    shuffle.shuffle(slices)
    for wire in slices:
        frame = frames.decode(wire)
        assert frame is not None
        inbox.feed(frame)
    assert list(iter(inbox.pop, None)) == list(itertools.chain.from_iterable(sent.values()))


def test_no_slice_is_longer_than_a_frame_may_be() -> None:
    outbox = Outbox(1)
    outbox.put(bytes(limits.MAX_MESSAGE_BYTES), Urgency.BULK)
    assert {len(each) for each in drain(outbox)[:-1]} == {limits.MAX_SLICE_BYTES}


def test_the_more_urgent_message_overtakes_between_two_slices() -> None:
    outbox = Outbox(1)
    outbox.put(bytes(100_000), Urgency.BULK)
    outbox.next_slice()
    outbox.put(b"verdict", Urgency.ROUND)
    frame = frames.decode(outbox.next_slice() or b"")
    assert frame is not None
    assert (frame.urgency, frame.body) == (Urgency.ROUND, b"verdict")


def test_bulk_never_takes_the_room_that_a_round_needs() -> None:
    outbox = Outbox(1)
    chunk = bytes(limits.PREFILL_CHUNK_BYTES)
    while outbox.has_room(len(chunk), Urgency.BULK):
        outbox.put(chunk, Urgency.BULK)
    assert outbox.has_room(200_000, Urgency.ROUND)


def test_credit_gives_room_back_and_late_credits_take_none_away() -> None:
    outbox = Outbox(1)
    outbox.put(bytes(limits.MAX_MESSAGE_BYTES), Urgency.ROUND)
    outbox.take_credit(cost(limits.MAX_MESSAGE_BYTES))
    outbox.take_credit(5)
    assert outbox.unprocessed_bytes == 0


def test_credit_for_more_than_was_sent_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Outbox(1).take_credit(1)


def test_an_inbox_holds_no_more_than_the_credit() -> None:
    inbox = Inbox()
    with pytest.raises(ProtocolError, match="more than it may"):
        for message_id in range(100):
            inbox.feed(data(Urgency.ROUND, message_id, 0, limits.MAX_MESSAGE_BYTES, b"only the beginning"))


def test_a_flood_of_empty_messages_is_bounded_too() -> None:
    inbox = Inbox()
    with pytest.raises(ProtocolError, match="more than it may"):
        for message_id in range(limits.MAX_UNPROCESSED_BYTES // limits.MESSAGE_OVERHEAD_BYTES + 1):
            inbox.feed(data(Urgency.ROUND, message_id, 0, 0, b""))


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, 10, b"abc"), (0, 0, 10, b"abc")],  # twice
        [(0, 0, 10, b"abcdef"), (0, 4, 10, b"efgh")],  # overlap
        [(0, 0, 10, b"abcdef"), (0, 6, 12, b"x")],  # another length
        [(0, 0, 3, b"abc"), (0, 0, 3, b"abc")],  # complete already
        [(0, 2, 10, b"abcdefgh"), (0, 0, 10, b"abc")],  # more than the whole
    ],
)
def test_pieces_that_contradict_each_other_are_refused(pieces: list[tuple[int, int, int, bytes]]) -> None:
    inbox = Inbox()
    with pytest.raises(ProtocolError):
        for piece in pieces:
            inbox.feed(data(Urgency.ROUND, *piece))


def test_ids_wrap_around() -> None:
    inbox = Inbox()
    inbox._expected[Urgency.ROUND] = 0xFFFFFFFF
    inbox.feed(data(Urgency.ROUND, 0, 0, 1, b"b"))
    assert inbox.pop() is None
    inbox.feed(data(Urgency.ROUND, 0xFFFFFFFF, 0, 1, b"a"))
    assert (inbox.pop(), inbox.pop()) == (b"a", b"b")


def test_credit_is_reported_when_enough_was_processed_and_once() -> None:
    inbox = Inbox()
    size = 60_000
    for message_id in range(3):
        inbox.feed(data(Urgency.ROUND, message_id, 0, 1, b"x"))
    assert inbox.pop() is not None
    assert inbox.credit_due() is None
    for message_id in range(3, 8):
        for offset in range(0, size, 15_000):
            inbox.feed(data(Urgency.ROUND, message_id, offset, size, bytes(15_000)))
    while inbox.pop() is not None:
        pass
    assert inbox.credit_due() == 3 * cost(1) + 5 * cost(size)
    assert inbox.credit_due() is None
