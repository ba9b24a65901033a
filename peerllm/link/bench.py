"""How long a block takes over a link, in both directions: `peerllm bench link` is this over a room.

One side measures, the other serves until it is told that all is done. A block out is answered with 16 bytes; a block in
is asked for with 16 bytes; so both take one round trip, and the block's bytes go one way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peerllm.link.config import Urgency
from peerllm.link.link import Link
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, ProtocolError

SIZES = (16, 1_000, 4_000, 16_000, 32_000, 64_000, 128_000, 200_000, 262_144)
SAMPLES = 200
FLOOD_CHUNK_BYTES = 16_000
"""What a flood sends and has confirmed at a time: half a second of a path of 256 kbit/s."""
_FLOOD_BYTES = 64_000
MAX_FLOOD_SECONDS = 10.0
_HEADER = struct.Struct("!BIQ3x")
_ECHO, _ASK, _BLOCK, _BULK, _BULK_TAKEN, _DONE, _FLOOD, _COUNT, _COUNTED = range(9)
SMALLEST = _HEADER.size


def _message(op: int, number: int, size: int = 0, length: int = SMALLEST) -> bytes:
    return _HEADER.pack(op, number, size).ljust(max(length, SMALLEST), b"\0")


def _parse(message: bytes) -> tuple[int, int, int]:
    if len(message) < SMALLEST:
        raise ProtocolError("a message of the bench is too short")
    op, number, size = _HEADER.unpack_from(message)
    return int(op), int(number), int(size)


async def serve(link: Link) -> None:
    """Answers until the other side says that all is done. Raises PeerAway when it is away for good."""
    taken = 0
    flood: Flood | None = None
    flooding: asyncio.Task[None] | None = None
    try:
        while True:
            op, number, size = _parse(await link.receive())
            if op == _DONE:
                await link.send(_message(_DONE, 0), Urgency.CONTROL)
                return
            if op == _ECHO:
                await link.send(_message(_BLOCK, number))
            elif op == _ASK and size <= limits.MAX_MESSAGE_BYTES:
                await link.send(_message(_BLOCK, number, length=size))
            elif op == _BULK:
                taken = size if number == 0 else taken + size
                await link.send(_message(_BULK_TAKEN, number, taken), Urgency.CONTROL)
            elif op == _COUNT:
                stats = link.stats()
                await link.send(_message(_COUNTED, stats.packets_sent & 0xFFFFFFFF, stats.packets_received))
            elif op == _FLOOD and flooding is None:
                flood = Flood(link)
                flooding = asyncio.create_task(flood.run(min(size / 1000, MAX_FLOOD_SECONDS)))
            elif op == _BULK_TAKEN and flood is not None:
                flood.take(size)
    finally:
        if flooding is not None:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)


async def _exchange(link: Link, op: int, number: int, size: int) -> float:
    """Milliseconds of one block."""
    begun = time.monotonic()
    await link.send(_message(op, number, size, size if op == _ECHO else SMALLEST))
    while _parse(await link.receive())[:2] != (_BLOCK, number):
        pass
    return (time.monotonic() - begun) * 1000


async def measure(link: Link, *, sizes: Sequence[int] = SIZES, samples: int = SAMPLES) -> dict[str, Any]:
    """The figures of `peerllm bench link --json`: `path`, `rtt_ms` (the floor), and for each size and direction
    `bytes`, `direction`, `p50_ms`, `p95_ms`, `p99_ms` and `retransmitted` (packets of this side's).

    Raises:
        PeerAway: the other side is away for good.
    """
    floor = min([await _exchange(link, _ECHO, number, SMALLEST) for number in range(10)])
    blocks = []
    number = 10
    for size in sizes:
        for direction, op in (("out", _ECHO), ("in", _ASK)):
            before = link.stats().retransmitted
            took = []
            for _ in range(samples):
                took.append(await _exchange(link, op, number, size))
                number += 1
            floor = min(floor, *took)
            blocks.append(
                {
                    "bytes": size,
                    "direction": direction,
                    **{f"p{share}_ms": round(quantile(took, share / 100), 2) for share in (50, 95, 99)},
                    "retransmitted": max(0, link.stats().retransmitted - before),
                }
            )
    return {"path": link.stats().path, "rtt_ms": round(floor, 2), "blocks": blocks}


async def measure_steady(
    link: Link, *, size: int = 4_000, a_second: float = 50.0, seconds: float = 60.0
) -> list[float]:
    """Milliseconds of each of `a_second` exchanges a second, whether the last was answered or not."""
    took: dict[int, float] = {}
    begun: dict[int, float] = {}
    count = int(a_second * seconds)

    async def send_all() -> None:
        start = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / a_second - time.monotonic()))
            begun[number] = time.monotonic()
            await link.send(_message(_ECHO, number, size, size))

    sending = asyncio.create_task(send_all())
    try:
        while len(took) < count:
            op, number, _ = _parse(await link.receive())
            if op == _BLOCK and number in begun:
                took[number] = (time.monotonic() - begun[number]) * 1000
    finally:
        sending.cancel()
    return [took[number] for number in sorted(took)]


async def measure_bulk(link: Link, *, size: int = 8_000_000, chunk: int = 200_000, beside: int = 0) -> dict[str, Any]:
    """`bytes_per_second` of a transfer out, start included, and the milliseconds of exchanges of `beside` bytes that
    went on meanwhile, one after the other."""
    begun = time.monotonic()
    total = size // chunk * chunk
    took: list[float] = []
    exchange = 0
    sent_at = 0.0

    async def send_all() -> None:
        for number in range(total // chunk):
            await link.send(_message(_BULK, number, chunk, chunk), Urgency.BULK)

    async def ask() -> None:
        nonlocal exchange, sent_at
        exchange += 1
        sent_at = time.monotonic()
        await link.send(_message(_ECHO, exchange, beside, beside))

    sending = asyncio.create_task(send_all())
    try:
        if beside:
            await ask()
        while True:
            op, number, taken = _parse(await link.receive())
            if op == _BLOCK and number == exchange:
                took.append((time.monotonic() - sent_at) * 1000)
                await ask()
            elif op == _BULK_TAKEN and taken >= total:
                break
    finally:
        sending.cancel()
    return {"bytes_per_second": total / (time.monotonic() - begun), "beside_ms": took}


@dataclass(frozen=True, slots=True)
class Loss:
    """Of datagrams, each a share of what was sent; `took_ms` are the exchanges that were counted."""

    out: float
    into: float
    took_ms: list[float]


async def measure_loss(link: Link, *, seconds: float = 3.0) -> Loss | None:
    """By both ends' own counts, while little is on the way. None when the connection was replaced meanwhile."""
    before, their_before = await _count(link)
    epoch = link.epoch
    took = await measure_steady(link, size=1_000, seconds=seconds)
    await asyncio.sleep(2 * quantile(took, 0.5) / 1000)  # what was sent again has arrived
    after, their_after = await _count(link)
    if link.epoch != epoch:
        return None
    sent, received = (late - early for late, early in zip(after, before, strict=True))
    their_sent, their_received = (
        (late - early) % (1 << 32) for late, early in zip(their_after, their_before, strict=True)
    )
    return Loss(_share_lost(sent, their_received), _share_lost(their_sent, received), took)


def _share_lost(sent: int, received: int) -> float:
    return max(0, sent - received) / max(1, sent)


async def _count(link: Link) -> tuple[tuple[int, int], tuple[int, int]]:
    """(sent, received) datagrams of this side, and of the other at the moment when it heard the question."""
    sent = link.stats().packets_sent
    await link.send(_message(_COUNT, 0))
    while True:
        op, their_sent, their_received = _parse(await link.receive())
        if op == _COUNTED:
            return (sent, link.stats().packets_received), (their_sent, their_received)


class Flood:
    """Fills a path for a while. What is on its way grows as what has arrived does: a thin path is left with little to
    carry when the time is over."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent = 0
        self._taken = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def take(self, taken: int) -> None:
        """The other side has so many bytes."""
        self._taken = max(self._taken, min(taken, self._sent))
        self._look()

    def _look(self) -> None:
        on_the_way = self._sent - self._taken
        if on_the_way <= _FLOOD_BYTES + self._taken:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for number in itertools.count():
                    await self._has_room.wait()
                    if time.monotonic() >= until:  # while nothing has to be waited for, no timeout gets its turn
                        return
                    await self._link.send(_message(_BULK, number, FLOOD_CHUNK_BYTES, FLOOD_CHUNK_BYTES), Urgency.BULK)
                    self._sent += FLOOD_CHUNK_BYTES
                    self._look()


async def measure_throughput(link: Link, *, seconds: float = 3.0) -> tuple[float, float]:
    """Bytes a second out and in, one after the other, each for `seconds`; from the first arrival on."""
    return await _flood_out(link, seconds), await _flood_in(link, seconds)


async def _flood_out(link: Link, seconds: float) -> float:
    flood = Flood(link)
    flooding = asyncio.create_task(flood.run(seconds))
    arrivals: list[tuple[float, int]] = []
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    op, _, taken = _parse(await link.receive())
                    if op == _BULK_TAKEN:
                        flood.take(taken)
                        arrivals.append((time.monotonic(), taken))
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    return _rate(arrivals)


async def _flood_in(link: Link, seconds: float) -> float:
    await link.send(_message(_FLOOD, 0, int(seconds * 1000)))
    arrivals: list[tuple[float, int]] = []
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                op, number, size = _parse(await link.receive())
                if op == _BULK:
                    taken += size
                    arrivals.append((time.monotonic(), taken))
                    await link.send(_message(_BULK_TAKEN, number, taken), Urgency.CONTROL)
    return _rate(arrivals)


def _rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes a second between the first of (when, bytes so far) and the last."""
    if len(arrivals) < 2:
        return 0.0
    (first_at, first), (last_at, last) = arrivals[0], arrivals[-1]
    return (last - first) / max(1e-6, last_at - first_at)


async def finish(link: Link) -> None:
    """Tells the serving side that all is done, and waits until it has heard that, LINK_CLOSE_SECONDS at most."""
    await link.send(_message(_DONE, 0))
    with contextlib.suppress(TimeoutError, PeerAway):
        async with asyncio.timeout(limits.LINK_CLOSE_SECONDS):
            while _parse(await link.receive())[0] != _DONE:  # a flood's last pieces may still come
                pass


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all reach or stay below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]
