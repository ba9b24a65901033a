"""A path between two associations in simulated time: delay, jitter, loss, a bottleneck with its buffer."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from peerllm.link.sctp import wire
from peerllm.link.sctp.association import Association
from peerllm.link.sctp.wire import Prefix

OVERHEAD = 65
"""Of IP, UDP and DTLS on each packet."""


class Simulation:
    """Events in order of time; `now` is the only clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), what))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until and not stop():
            self.now, _, what = heapq.heappop(self._events)
            what()
        if not stop():
            self.now = until


@dataclass
class Queue:
    """One direction's bottleneck, which several flows may share. Rates in bytes a second, buffers in bytes."""

    simulation: Simulation
    rate: float | None = None
    buffer: float = float("inf")
    free_at: float = 0.0
    waits: list[float] = field(default_factory=list)
    dropped: int = 0

    def pass_through(self, size: int) -> float | None:
        """When a packet of `size` has left it, or None when it is dropped."""
        now = self.simulation.now
        if self.rate is None:
            return now
        wait = max(0.0, self.free_at - now)
        if wait * self.rate + size > self.buffer:
            self.dropped += 1
            return None
        self.waits.append(wait)
        self.free_at = now + wait + size / self.rate
        return self.free_at


@dataclass
class Way:
    """One direction of a path."""

    simulation: Simulation
    delay: float
    queue: Queue
    loss: float = 0.0
    jitter: float = 0.0
    lump: float = 0.0
    """Packets arrive together, so many seconds after the last did: a radio link's frames, a machine that wakes late."""
    random: random.Random = field(default_factory=lambda: random.Random(1))
    is_cut: bool = False
    packets: int = 0

    def carry(self, size: int, arrive: Callable[[], None]) -> None:
        self.packets += 1
        left = self.queue.pass_through(size + OVERHEAD)
        if left is None or self.is_cut or self.random.random() < self.loss:
            return
        arrives = left + self.delay + self.random.random() * self.jitter
        self.simulation.at(math.ceil(arrives / self.lump) * self.lump if self.lump else arrives, arrive)


class End:
    """An association with a clock and a way out."""

    def __init__(self, simulation: Simulation, way: Way, *, tsn: int, other_tsn: int, packet: int = 1189) -> None:
        self.simulation = simulation
        self.way = way
        self.other: End | None = None
        self.messages: list[tuple[float, bytes]] = []
        self.on_message: Callable[[bytes], None] = lambda message: None
        self.association = Association(
            first_tsn=tsn,
            last_tsn=other_tsn - 1,
            prefix=Prefix(5000, 5000, 7),
            max_packet_bytes=packet,
            deliver=self._deliver,
        )
        self._timer: float | None = None

    def _deliver(self, stream: int, protocol: int, message: bytes) -> None:
        self.messages.append((self.simulation.now, message))
        self.on_message(message)

    def send(self, message: bytes, *, ordered: bool = False) -> None:
        self.association.sender.put(0, 53, message, ordered=ordered)
        self.poll()

    def poll(self) -> None:
        for packet in self.association.poll(self.simulation.now):
            self.way.carry(len(packet), lambda packet=packet: self.other and self.other.arrive(packet))
        self._arm()

    def arrive(self, packet: bytes) -> None:
        chunks = wire.parse(packet)
        assert chunks is not None
        self.association.receive(chunks, self.simulation.now)
        self.poll()

    def _arm(self) -> None:
        timer = self.association.next_timer
        if timer is None or (self._timer is not None and self.simulation.now < self._timer <= timer):
            return
        # Timers of a loop have milliseconds.
        self._timer = timer = max(timer, self.simulation.now + 0.001)

        def fire() -> None:
            if self._timer == timer:
                self._timer = None
            due = self.association.next_timer
            if due is not None and due <= self.simulation.now:
                self.poll()
            else:
                self._arm()

        self.simulation.at(timer, fire)


@dataclass
class Path:
    """Two ends and both ways between them; `rtt` in seconds."""

    rtt: float = 0.08
    loss: float = 0.0
    jitter: float = 0.0
    lump: float = 0.0
    rate: float | None = None
    buffer_seconds: float = 0.1
    seed: int = 1
    simulation: Simulation = field(default_factory=Simulation)
    queues: tuple[Queue, Queue] | None = None

    def __post_init__(self) -> None:
        if self.queues is None:
            buffer = float("inf") if self.rate is None else self.rate * self.buffer_seconds
            self.queues = (
                Queue(self.simulation, self.rate, buffer),
                Queue(self.simulation, self.rate, buffer),
            )
        there, back = (
            Way(
                self.simulation,
                self.rtt / 2,
                queue,
                self.loss,
                self.jitter,
                self.lump,
                random.Random(self.seed + index),
            )
            for index, queue in enumerate(self.queues)
        )
        self.left = End(self.simulation, there, tsn=(1 << 32) - 20, other_tsn=1000)
        self.right = End(self.simulation, back, tsn=1000, other_tsn=(1 << 32) - 20)
        self.left.other, self.right.other = self.right, self.left

    def echo(self, size: int, count: int, *, gap: float = 0.02) -> list[float]:
        """`count` blocks of `size`, each answered with 16 bytes; how many round trips each took."""
        took: list[float] = []
        block = bytes(size)
        self.right.on_message = lambda message: self.right.send(bytes(16)) if len(message) == size else None
        for _ in range(count):
            begun, known = self.simulation.now, len(self.left.messages)
            self.left.send(block)
            self.simulation.run(begun + 60, lambda known=known: len(self.left.messages) > known)
            took.append((self.simulation.now - begun) / self.rtt)
            self.simulation.run(self.simulation.now + gap)
        return took


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
