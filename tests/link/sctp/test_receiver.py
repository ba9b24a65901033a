"""What has arrived: SACKs as a model of sets would write them, messages in any order of fragments."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerllm.link.sctp import wire
from peerllm.link.sctp.receiver import SACK_DELAY_SECONDS, Receiver
from peerllm.link.sctp.wire import FIRST_FRAGMENT, IMMEDIATE, LAST_FRAGMENT, UNORDERED, DataChunk, SackChunk

WHOLE = FIRST_FRAGMENT | LAST_FRAGMENT


def receiver(last_tsn: int = 0) -> tuple[Receiver, list[bytes]]:
    messages: list[bytes] = []
    return Receiver(last_tsn, lambda stream, protocol, message: messages.append(message)), messages


def chunk(tsn: int, flags: int = WHOLE | UNORDERED, payload: bytes = b"x", sequence: int = 0) -> DataChunk:
    return DataChunk(flags, tsn % wire.MODULO, 0, sequence, 53, payload)


def sack_of(made: Receiver) -> SackChunk:
    parsed = wire.parse(bytes(12) + made.make_sack())
    assert parsed is not None
    assert isinstance(parsed[0], SackChunk)
    return parsed[0]


@given(st.lists(st.integers(1, 40), max_size=80), st.sampled_from([0, wire.MODULO - 20]))
def test_a_sack_tells_exactly_what_has_arrived(arrivals: list[int], begin: int) -> None:
    made, _ = receiver(begin)
    seen: set[int] = set()
    for position in arrivals:
        made.take(chunk(begin + position), 0.0)
        seen.add(position)
        sack = sack_of(made)
        cumulative = 0
        while cumulative + 1 in seen:
            cumulative += 1
        assert sack.cumulative == (begin + cumulative) % wire.MODULO
        told = {cumulative + offset for first, last in sack.gaps for offset in range(first, last + 1)}
        assert told == {each for each in seen if each > cumulative}
        assert all(before[1] + 1 < after[0] for before, after in zip(sack.gaps, sack.gaps[1:], strict=False))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(), st.booleans())
def test_messages_come_whole_in_any_order_of_fragments(
    counts: list[int], shuffle: random.Random, ordered: bool
) -> None:
    made, messages = receiver(wire.MODULO - 5)
    chunks, sent, tsn = [], [], wire.MODULO - 4
    for number, count in enumerate(counts):
        sent.append(b"".join(b"%d.%d," % (number, index) for index in range(count)))
        for index in range(count):
            flags = 0 if ordered else UNORDERED
            flags |= FIRST_FRAGMENT if index == 0 else 0
            flags |= LAST_FRAGMENT if index == count - 1 else 0
            chunks.append(chunk(tsn, flags, b"%d.%d," % (number, index), number))
            tsn += 1
    shuffle.shuffle(chunks)
    for each in chunks:
        made.take(each, 0.0)
    assert messages == sent if ordered else sorted(messages) == sorted(sent)
    assert made.held_bytes == 0


def test_a_duplicate_is_told_and_delivered_once() -> None:
    made, messages = receiver()
    made.take(chunk(1), 0.0)
    made.take(chunk(1), 0.0)
    assert messages == [b"x"]
    assert sack_of(made).duplicates == (1,)
    assert sack_of(made).duplicates == ()


def test_a_sender_that_sets_the_immediate_bit_is_answered_every_second_packet() -> None:
    made, _ = receiver()
    made.take(chunk(1, WHOLE | UNORDERED | IMMEDIATE), 1.0)
    assert made.sack_due == 1.0
    made.make_sack()
    made.take(chunk(2), 2.0)
    assert made.sack_due == 2.0 + SACK_DELAY_SECONDS
    made.take(chunk(3), 2.001)
    assert made.sack_due == 2.001


def test_a_sender_that_does_not_is_answered_at_once_as_its_window_grows_by_that() -> None:
    made, _ = receiver()
    made.take(chunk(1), 1.0)
    assert made.sack_due == 1.0


def test_a_gap_and_what_fills_it_are_answered_at_once() -> None:
    made, _ = receiver()
    made.take(chunk(1, WHOLE | IMMEDIATE), 0.0)
    made.make_sack()
    made.take(chunk(3), 1.0)
    assert made.sack_due == 1.0
    made.make_sack()
    made.take(chunk(2), 2.0)
    assert made.sack_due == 2.0


def test_a_tsn_far_beyond_the_window_is_not_held() -> None:
    made, messages = receiver()
    made.take(chunk(1_000_000), 0.0)
    assert messages == []
    assert sack_of(made).gaps == []


def test_fragments_that_wait_shrink_the_window_that_is_told() -> None:
    made, _ = receiver()
    before = sack_of(made).window
    made.take(chunk(1, FIRST_FRAGMENT, bytes(1000)), 0.0)
    assert sack_of(made).window == before - 1000 - 64


def test_fragments_of_a_message_without_an_end_are_bounded() -> None:
    made, _ = receiver()
    with pytest.raises(ValueError, match="window"):
        for tsn in range(1, 200_000):
            made.take(chunk(tsn, FIRST_FRAGMENT if tsn == 1 else 0), 0.0)
            made.make_sack()
