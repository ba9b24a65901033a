"""What a sender refuses from the other side, and what its timers do."""

from __future__ import annotations

import itertools

import pytest

from peerllm.link.sctp import wire
from peerllm.link.sctp.sender import Sender
from peerllm.link.sctp.wire import DataChunk, Prefix, SackChunk
from peerllm.protocol import limits


def sender_with(size: int) -> Sender:
    made = Sender(1, Prefix(5000, 5000, 7), 1189)
    made.put(0, 53, bytes(size), ordered=False)
    made.poll(0.0)
    return made


def tsns(packets: list[bytes]) -> list[int]:
    return [chunk.tsn for packet in packets for chunk in wire.parse(packet) or [] if isinstance(chunk, DataChunk)]


@pytest.mark.parametrize(
    "sack",
    [
        SackChunk(50, 1000, [], ()),
        SackChunk(0, 1000, [(2, 60_000)], ()),
        SackChunk(0, 1000, [(1, 2)], ()),
        SackChunk(0, 1000, [(4, 3)], ()),
        SackChunk(0, 1000, [(2, 4), (3, 4)], ()),
    ],
)
def test_a_sack_of_what_was_never_sent_is_refused(sack: SackChunk) -> None:
    with pytest.raises(ValueError, match="SACK"):
        sender_with(5_000).take(sack, 0.1)


def test_an_old_sack_does_nothing() -> None:
    made = sender_with(5_000)
    made.take(SackChunk(3, 100_000, [], ()), 0.1)
    flight = made.in_flight
    made.take(SackChunk(1, 100_000, [], ()), 0.11)
    assert made.in_flight == flight


def test_the_first_window_is_sixteen_packets() -> None:
    made = sender_with(100_000)
    assert made.in_flight <= limits.SCTP_INITIAL_PACKETS * 1_200
    assert made.in_flight > (limits.SCTP_INITIAL_PACKETS - 1) * 1_189


def test_the_other_sides_receive_window_is_obeyed() -> None:
    made = sender_with(100_000)
    made.take(SackChunk(16, 3_000, [], ()), 0.08)
    made.poll(0.08)
    assert made.in_flight <= 3_000


def test_a_probe_comes_before_t3_and_repeats_the_last_chunk() -> None:
    made = sender_with(3_000)
    timer = made.next_timer
    assert timer is not None
    assert timer < limits.SCTP_FIRST_T3_SECONDS
    assert tsns(made.fire(timer)) == [3]


def test_t3_takes_all_for_lost_and_doubles() -> None:
    made = sender_with(10_000)
    made.fire(made.next_timer or 0.0)
    first = made.next_timer
    assert first is not None
    assert made.fire(first) == []
    assert tsns(made.poll(first)) == [1, 2, 3, 4]
    waits = []
    for _ in range(4):
        probe = made.next_timer
        assert probe is not None
        made.fire(probe)
        expiry = made.next_timer
        assert expiry is not None
        waits.append(expiry - first)
        first = expiry
        made.fire(expiry)
        made.poll(expiry)
    assert all(after >= 1.8 * before or after >= 8.0 for before, after in itertools.pairwise(waits))


def test_the_last_packet_of_a_burst_asks_for_an_answer_at_once() -> None:
    made = Sender(1, Prefix(5000, 5000, 7), 1189)
    made.put(0, 53, bytes(3_000), ordered=False)
    flags = [chunk.flags for packet in made.poll(0.0) for chunk in wire.parse(packet) or []]  # type: ignore[union-attr]
    assert [bool(each & wire.IMMEDIATE) for each in flags] == [False, False, True]


def test_no_packet_is_longer_than_the_path_carries() -> None:
    made = Sender(1, Prefix(5000, 5000, 7), limits.SCTP_SAFE_PACKET_BYTES)
    made.put(0, 53, bytes(16_000), ordered=False)
    sack = wire.sack_chunk(1, 1, [], [])
    assert max(len(packet) for packet in made.poll(0.0, sack)) <= limits.SCTP_SAFE_PACKET_BYTES
