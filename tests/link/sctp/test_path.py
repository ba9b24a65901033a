"""Both halves over a simulated path: no clock but the simulation's, so that figures are the same on every machine.

The path has 80 ms; figures are multiples of it. `tests/lab` measures the same on real sockets.
"""

from __future__ import annotations

import random

import pytest

from peerllm.link.sctp.window import Window
from peerllm.protocol import limits
from tests.link.sctp.path import Path, Queue, Simulation, quantile

MBIT = 125_000.0


def transfer(path: Path, size: int, *, begin: float = 0.0, slice_bytes: int = 16_384) -> None:
    """Keeps `size` bytes coming from the left, a slice at a time, as a link does."""
    left = [size]
    send = path.left.poll

    def poll() -> None:
        send()
        while left[0] > 0 and path.left.association.sender.queued_bytes < 2_400:
            left[0] -= slice_bytes
            path.left.association.sender.put(0, 53, bytes(slice_bytes), ordered=False)
            send()

    path.left.poll = poll  # type: ignore[method-assign]
    path.simulation.at(begin, poll)


def received(path: Path) -> int:
    return sum(len(message) for _, message in path.right.messages)


@pytest.mark.parametrize(
    ("size", "p50", "p99"), [(16, 1.01, 1.02), (16_000, 1.08, 1.3), (64_000, 1.2, 1.5), (200_000, 1.5, 2.1)]
)
def test_a_block_takes_one_round_trip_on_a_clean_path(size: int, p50: float, p99: float) -> None:
    first, *took = Path().echo(size, 100)
    assert first <= 3.1  # nothing is known of the path yet
    assert quantile(took, 0.5) <= p50
    assert quantile(took, 0.99) <= p99


@pytest.mark.parametrize(("size", "p50", "p95"), [(16_000, 1.2, 2.3), (64_000, 1.3, 2.5), (200_000, 2.6, 4.0)])
def test_a_lost_packet_costs_about_one_more_round_trip(size: int, p50: float, p95: float) -> None:
    took = Path(loss=0.005, jitter=0.001).echo(size, 200)
    assert quantile(took, 0.5) <= p50
    assert quantile(took, 0.95) <= p95


@pytest.mark.parametrize(("size", "p50"), [(16_000, 1.2), (64_000, 1.5), (200_000, 2.4)])
def test_a_bottleneck_costs_its_own_time_and_no_more(size: int, p50: float) -> None:
    path = Path(rate=20 * MBIT, buffer_seconds=0.1)
    assert quantile(path.echo(size, 100), 0.5) <= p50
    assert path.left.association.sender.retransmitted == 0


@pytest.mark.parametrize("buffer_seconds", [0.1, 1.0])
@pytest.mark.parametrize(("rate", "share"), [(20 * MBIT, 0.85), (2 * MBIT, 0.8)])
def test_a_bulk_transfer_fills_the_bottleneck_without_a_queue(rate: float, share: float, buffer_seconds: float) -> None:
    path = Path(rate=rate, buffer_seconds=buffer_seconds)
    size = int(rate * 8)
    transfer(path, size)
    path.simulation.run(60, lambda: received(path) >= size)
    assert received(path) >= size
    assert size / path.simulation.now >= share * rate
    sender = path.left.association.sender
    assert sender.retransmitted <= 0.05 * path.left.way.packets
    queue = path.queues[0].waits if path.queues else []
    assert quantile(queue, 0.95) <= (0.04 if rate > 5 * MBIT else 0.1)


@pytest.mark.parametrize("lump", [0.005, 0.01])
@pytest.mark.parametrize("rtt", [0.02, 0.08, 0.16])
@pytest.mark.parametrize("mbit", [5, 10, 20, 50])
def test_what_arrives_in_lumps_makes_no_queue(mbit: int, rtt: float, lump: float) -> None:
    """A few packets that came together once told a rate that was a multiple of the path's."""
    rate = mbit * MBIT
    path = Path(rtt=rtt, rate=rate, buffer_seconds=1.0, lump=lump)
    size = int(rate * 4)
    transfer(path, size)
    path.simulation.run(60, lambda: received(path) >= size)
    assert size / path.simulation.now >= 0.8 * rate
    assert path.queues is not None
    assert quantile(path.queues[0].waits, 0.95) <= 0.04 + 3 * lump
    assert max(path.queues[0].waits) <= 0.1


def test_a_last_sack_that_was_held_back_does_not_tell_the_rate() -> None:
    """As in the lab: half of a flight's SACKs came together, the rest as the bottleneck let them, one 10 ms late."""
    window, flight = Window(), 27_900
    arrivals = (0.0, 0.0006, 0.001, 0.0018, 0.0033, 0.0046, 0.0056, 0.0169)
    for after in arrivals:
        window.sampled(0.083 + after, 0.13 + after)
        window.limited()
        window.delivered(2_800, 0.0489, flight, 0.13 + after)
        flight -= 2_800
    assert 0.7 * 20 * MBIT <= window.train_rate <= 1.3 * 20 * MBIT


@pytest.mark.parametrize("begin", [1.5, 1.53])
@pytest.mark.parametrize("rtt", [0.05, 0.08, 0.12])
def test_a_window_shrinks_once_for_one_queue(rtt: float, begin: float) -> None:
    """Behind a window that was far too large the path never runs empty."""
    path = Path(rtt=rtt, rate=20 * MBIT, buffer_seconds=1.0)
    assert path.queues is not None
    queue = path.queues[0]
    transfer(path, 1 << 30)
    path.simulation.run(begin)
    window = path.left.association.sender.window
    window.size *= 3
    window.train_rate *= 4
    while path.simulation.now < 3:
        path.simulation.run(path.simulation.now + 0.002)
        assert queue.free_at > path.simulation.now
    assert max(queue.waits) > 0.1
    assert queue.waits[-1] < 0.04


@pytest.mark.parametrize("size", [64_000, 200_000])
def test_a_rate_that_was_told_too_low_is_found_again(size: int) -> None:
    path = Path(rate=20 * MBIT)
    path.echo(size, 10)
    usual = path.echo(size, 3)
    path.left.association.sender.window.train_rate /= 10
    path.echo(size, 10)
    assert max(path.echo(size, 3)) <= max(usual) + 0.05
    path.left.association.sender.window.train_rate /= 10
    transfer(path, 10_000_000)
    known, begun = received(path), path.simulation.now
    path.simulation.run(begun + 3)
    assert received(path) - known >= 0.8 * 3 * path.left.way.queue.rate  # type: ignore[operator]


def test_two_flows_share_a_bottleneck() -> None:
    simulation, rate = Simulation(), 20 * MBIT
    queues = Queue(simulation, rate, rate), Queue(simulation, rate, rate)
    flows = [Path(rate=rate, simulation=simulation, queues=queues, seed=seed) for seed in (1, 50)]
    for begin, flow in enumerate(flows):
        transfer(flow, 1 << 30, begin=2.0 * begin)
    simulation.run(6.0)
    before = [received(flow) for flow in flows]
    simulation.run(14.0)
    shares = sorted(received(flow) - known for flow, known in zip(flows, before, strict=True))
    assert shares[1] <= 2 * shares[0]


def test_a_block_passes_while_a_third_is_lost() -> None:
    path = Path(loss=0.3, jitter=0.001, seed=5)
    took = path.echo(64_000, 10)
    assert max(took) * path.rtt < 20


def test_a_cut_ends_with_the_first_packet_that_passes() -> None:
    path = Path()
    path.echo(64_000, 3)
    for way in (path.left.way, path.right.way):
        way.is_cut = True
    known = len(path.left.messages)
    path.left.send(bytes(64_000))
    path.simulation.run(path.simulation.now + 2.0)
    for way in (path.left.way, path.right.way):
        way.is_cut = False
    restored = path.simulation.now
    path.simulation.at(restored + 0.5, lambda: path.left.send(b"ping"))
    path.simulation.run(restored + 10, lambda: len(path.left.messages) > known)
    assert path.simulation.now - restored < 1.2


def test_a_window_begins_anew_after_a_cut() -> None:
    path = Path(rate=20 * MBIT)
    path.echo(200_000, 5)
    for way in (path.left.way, path.right.way):
        way.is_cut = True
    path.left.send(bytes(200_000))
    path.simulation.run(path.simulation.now + 3)
    for way in (path.left.way, path.right.way):
        way.is_cut = False
    window, receiver = path.left.association.sender.window, path.right.association.receiver
    known = receiver.cumulative
    path.simulation.run(path.simulation.now + 8, lambda: receiver.cumulative != known)
    path.simulation.run(path.simulation.now + 0.06)
    assert window.size <= limits.SCTP_INITIAL_PACKETS * 1_200


def test_a_longer_way_does_not_look_like_loss() -> None:
    path = Path()
    path.echo(64_000, 5)
    sent = path.left.association.sender.retransmitted
    path.left.way.delay = path.right.way.delay = 0.06
    path.echo(64_000, 5)
    assert path.left.association.sender.retransmitted - sent <= 4


def test_reordering_beyond_the_window_widens_it() -> None:
    path = Path(jitter=0.03)
    path.echo(64_000, 40)
    sender = path.left.association.sender
    early, packets = sender.retransmitted, path.left.way.packets
    path.echo(64_000, 40)
    assert sender.retransmitted - early < 0.1 * (path.left.way.packets - packets)


def test_the_window_never_falls_below_its_floor_nor_rises_above_its_ceiling() -> None:
    path = Path(loss=0.5, seed=3)
    path.echo(16_000, 5)
    assert path.left.association.sender.window.size >= limits.SCTP_MIN_PACKETS * 1_200
    fast = Path(rtt=0.3)
    fast.echo(250_000, 30)
    assert fast.left.association.sender.window.size <= limits.SCTP_MAX_WINDOW_BYTES


def test_what_was_sent_arrives_once_whatever_the_path_does() -> None:
    choose = random.Random(11)
    for seed in range(8):
        path = Path(loss=0.05, jitter=choose.choice((0, 0.01)), rate=choose.choice((None, 5 * MBIT)), seed=seed)
        sent = [choose.randbytes(choose.choice((1, 100, 5_000, 60_000))) for _ in range(30)]
        for message in sent:
            path.left.send(message, ordered=True)
        path.simulation.run(120, lambda path=path: len(path.right.messages) >= 30)
        path.simulation.run(path.simulation.now + 5)
        assert [message for _, message in path.right.messages] == sent
        assert path.left.association.sender.in_flight == 0
        assert path.left.association.next_timer is None
