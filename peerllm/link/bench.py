"""How long a block takes over a link, in both directions: `peerllm bench link` is this over a room.

One side measures, the other serves until it is told that all is done. A block out is answered with 16 bytes; a block in
is asked for with 16 bytes; so both take one round trip, and the block's bytes go one way.

What was on the way when the connection was replaced is gone for good. So nothing here waits without looking at the
epoch, nor longer than a limit on a link that is UP; how long a link may be SUSPECT is the link's own business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from peerllm.link.config import LinkState, Urgency
from peerllm.link.link import Link
from peerllm.protocol import limits
from peerllm.protocol.errors import LinkError, PeerAway, PeerllmError, ProtocolError

SIZES = (16, 1_000, 4_000, 16_000, 32_000, 64_000, 128_000, 200_000, 262_144)
SAMPLES = 200
FLOOD_CHUNK_BYTES = 16_000
"""What a flood sends and has confirmed at a time: half a second of a path of 256 kbit/s."""
_FLOOD_BYTES = 64_000
MAX_FLOOD_SECONDS = 10.0
EXCHANGE_SECONDS = 10.0
"""What is not answered by then on a link that is UP is not answered any more; a block has its own time besides."""
SLOWEST_BYTES_PER_SECOND = 8_000
SERVE_SECONDS = 60.0
"""A serving side that hears nothing for so long has been forgotten; more than the largest block takes."""
LEAVE_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_HEADER = struct.Struct("!BIQ3x")
_ECHO, _ASK, _BLOCK, _BULK, _BULK_TAKEN, _DONE, _FLOOD, _COUNT, _COUNTED = range(9)
_ALL_MEASURED, _BROKEN_OFF = range(2)
"""The numbers of a _DONE."""
_MAX_LATE = 1_000
"""Answers to what was asked before: there are few, and a peer that sends others without end is not listened to."""
SMALLEST = _HEADER.size
T = TypeVar("T")


class Replaced(LinkError):
    """The connection was replaced by a new one while something was on the way."""

    def __init__(self) -> None:
        super().__init__("The connection was replaced while it was measured. Try again.")


class Left(PeerAway):
    """The other side said that it ends."""

    def __init__(self) -> None:
        super().__init__("The other side ended before all was measured.")


class _Heard(NamedTuple):
    op: int
    number: int
    size: int
    """What the other side says; `length` is what came."""
    length: int


def _message(op: int, number: int, size: int = 0, length: int = SMALLEST) -> bytes:
    return _HEADER.pack(op, number, size).ljust(max(length, SMALLEST), b"\0")


def _parse(message: bytes) -> _Heard:
    if len(message) < SMALLEST:
        raise ProtocolError("a message of the bench is too short")
    op, number, size = _HEADER.unpack_from(message)
    if op > _COUNTED:
        raise ProtocolError(f"the bench knows no message {op}")
    return _Heard(op, number, size, len(message))


async def _while_up(link: Link, work: Callable[[], Awaitable[T]], seconds: float, epoch: int | None = None) -> T:
    """What `work` gives, which is begun anew now and then and has to be safe to cancel.

    Raises:
        Replaced: the connection is not that of `epoch` any more.
        LinkError: the link was UP for `seconds` without it.
        PeerAway: the link is DOWN.
    """
    left = seconds
    while True:
        if epoch is not None and link.epoch != epoch:
            raise Replaced
        try:
            async with asyncio.timeout(min(_LOOK_SECONDS, max(left, 0.001))):
                return await work()
        except TimeoutError:
            left = left - _LOOK_SECONDS if link.state is LinkState.UP else seconds
        if left <= 0:
            raise LinkError(f"The link is up, and nothing came over it for {seconds:.0f} s. Try again.")


async def _hear(link: Link, epoch: int, seconds: float = EXCHANGE_SECONDS) -> _Heard:
    """The next message to the side that measures."""
    heard = _parse(await _while_up(link, link.receive, seconds, epoch))
    if heard.op == _DONE:
        await _say(link, _message(_DONE, heard.number), Urgency.CONTROL)
        raise Left
    return heard


async def _say(link: Link, message: bytes, urgency: Urgency = Urgency.ROUND, *, epoch: int | None = None) -> None:
    await _while_up(link, lambda: link.send(message, urgency), EXCHANGE_SECONDS, epoch)


async def serve(link: Link, *, patience: float = SERVE_SECONDS) -> None:
    """Answers until the other side says that all is done.

    Raises:
        PeerAway: it is away for good; Left: it ended before all was done.
        LinkError: it says nothing for `patience`, or takes no answer.
        ProtocolError: what it says is no message of the bench.
    """
    taken = 0
    flood: Flood | None = None
    flooding: asyncio.Task[None] | None = None
    try:
        while True:
            op, number, size, length = _parse(await _while_up(link, link.receive, patience))
            if op == _DONE:
                await _say(link, _message(_DONE, number), Urgency.CONTROL)
                if number != _ALL_MEASURED:
                    raise Left
                return
            if op == _ECHO:
                await _say(link, _message(_BLOCK, number))
            elif op == _ASK:
                if size > limits.MAX_MESSAGE_BYTES:
                    raise ProtocolError("the other side asks for a block that is longer than any message")
                await _say(link, _message(_BLOCK, number, length=size))
            elif op == _BULK:
                taken = length if number == 0 else taken + length
                await _say(link, _message(_BULK_TAKEN, number, taken), Urgency.CONTROL)
            elif op == _COUNT:
                stats = link.stats()
                await _say(link, _message(_COUNTED, stats.packets_sent & 0xFFFFFFFF, stats.packets_received))
            elif op == _FLOOD:
                await _end(flooding)  # of a connection that was replaced: what it waits for never comes
                flood = Flood(link)
                flooding = asyncio.create_task(flood.run(min(size / 1000, MAX_FLOOD_SECONDS)))
            elif op == _BULK_TAKEN and flood is not None:
                flood.take(size)
    finally:
        await _end(flooding)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _exchange(link: Link, op: int, number: int, size: int) -> float:
    """Milliseconds of one block; asked again over a new connection, as the old one's answer does not come."""
    while True:
        try:
            return await _exchange_in(link, link.epoch, op, number, size)
        except Replaced:
            continue


async def _exchange_in(link: Link, epoch: int, op: int, number: int, size: int) -> float:
    begun = time.monotonic()
    seconds = EXCHANGE_SECONDS + size / SLOWEST_BYTES_PER_SECOND
    await _say(link, _message(op, number, size, size if op == _ECHO else SMALLEST), epoch=epoch)
    late = 0
    while True:
        heard = await _hear(link, epoch, seconds)
        if (heard.op, heard.number) == (_BLOCK, number):
            break
        late += 1
        if late > _MAX_LATE:
            raise ProtocolError("the other side sends what nobody asked for")
    if heard.length != (max(size, SMALLEST) if op == _ASK else SMALLEST):
        raise ProtocolError("a block is not as long as the one that was asked for")
    return (time.monotonic() - begun) * 1000


async def measure(link: Link, *, sizes: Sequence[int] = SIZES, samples: int = SAMPLES) -> dict[str, Any]:
    """The figures of `peerllm bench link --json`: `path`, `rtt_ms` (the floor), and for each size and direction
    `bytes`, `direction`, `p50_ms`, `p95_ms`, `p99_ms` and `retransmitted` (packets of this side's).

    Raises:
        PeerAway: the other side is away for good.
        LinkError, ProtocolError: it does not answer, or not as it has to.
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
    """Milliseconds of each of `a_second` exchanges a second, whether the last was answered or not.

    Raises:
        Replaced: what was on the way is gone.
        PeerAway, LinkError, ProtocolError: the other side is away, does not answer, or not as it has to.
    """
    epoch = link.epoch
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
            heard = await _hear(link, epoch)
            if heard.op == _BLOCK and heard.number in begun:
                took[heard.number] = (time.monotonic() - begun[heard.number]) * 1000
    finally:
        await _end(sending)
    return [took[number] for number in sorted(took)]


async def measure_bulk(link: Link, *, size: int = 8_000_000, chunk: int = 200_000, beside: int = 0) -> dict[str, Any]:
    """`bytes_per_second` of a transfer out, start included, and the milliseconds of exchanges of `beside` bytes that
    went on meanwhile, one after the other."""
    epoch = link.epoch
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
            heard = await _hear(link, epoch)
            if heard.op == _BLOCK and heard.number == exchange:
                took.append((time.monotonic() - sent_at) * 1000)
                await ask()
            elif heard.op == _BULK_TAKEN and heard.size >= total:
                break
    finally:
        await _end(sending)
    return {"bytes_per_second": total / (time.monotonic() - begun), "beside_ms": took}


@dataclass(frozen=True, slots=True)
class Loss:
    """Of datagrams, each a share of what was sent; `took_ms` are the exchanges that were counted."""

    out: float
    into: float
    took_ms: list[float]


async def measure_loss(link: Link, *, seconds: float = 3.0) -> Loss | None:
    """By both ends' own counts, while little is on the way. None when the connection was replaced meanwhile."""
    epoch = link.epoch
    try:
        before, their_before = await _count(link, epoch)
        took = await measure_steady(link, size=1_000, seconds=seconds)
        await asyncio.sleep(2 * quantile(took, 0.5) / 1000)  # what was sent again has arrived
        after, their_after = await _count(link, epoch)
    except Replaced:
        return None
    sent, received = (late - early for late, early in zip(after, before, strict=True))
    their_sent, their_received = (
        (late - early) % (1 << 32) for late, early in zip(their_after, their_before, strict=True)
    )
    return Loss(_share_lost(sent, their_received), _share_lost(their_sent, received), took)


def _share_lost(sent: int, received: int) -> float:
    return max(0, sent - received) / max(1, sent)


async def _count(link: Link, epoch: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(sent, received) datagrams of this side, and of the other at the moment when it heard the question."""
    sent = link.stats().packets_sent
    await _say(link, _message(_COUNT, 0), epoch=epoch)
    while True:
        heard = await _hear(link, epoch)
        if heard.op == _COUNTED:
            return (sent, link.stats().packets_received), (heard.number, heard.size)


class Flood:
    """Fills a path for a while. What is on its way grows as what has arrived does: a thin path is left with little to
    carry when the time is over."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent = 0
        self._taken = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def take(self, taken: int) -> int:
        """The other side says that it has so many bytes. Gives what it can have of them."""
        self._taken = max(self._taken, min(taken, self._sent))
        self._look()
        return self._taken

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
    """Bytes a second out and in, one after the other, each for `seconds`; from the first arrival on. Raises what
    `measure_steady` does."""
    return await _flood_out(link, seconds), await _flood_in(link, seconds)


async def _flood_out(link: Link, seconds: float) -> float:
    epoch = link.epoch
    flood = Flood(link)
    flooding = asyncio.create_task(flood.run(seconds))
    arrivals: list[tuple[float, int]] = []
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    heard = await _hear(link, epoch)
                    if heard.op == _BULK_TAKEN:
                        arrivals.append((time.monotonic(), flood.take(heard.size)))
    finally:
        await _end(flooding)
    return _rate_in(link, epoch, arrivals)


async def _flood_in(link: Link, seconds: float) -> float:
    epoch = link.epoch
    await _say(link, _message(_FLOOD, 0, int(seconds * 1000)), epoch=epoch)
    arrivals: list[tuple[float, int]] = []
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                heard = await _hear(link, epoch)
                if heard.op == _BULK:
                    taken += heard.length
                    arrivals.append((time.monotonic(), taken))
                    await _say(link, _message(_BULK_TAKEN, heard.number, taken), Urgency.CONTROL, epoch=epoch)
    return _rate_in(link, epoch, arrivals)


def _rate_in(link: Link, epoch: int, arrivals: Sequence[tuple[float, int]]) -> float:
    """A flood that a cut ended says nothing of the path. Raises Replaced."""
    if link.epoch != epoch or link.state is LinkState.SUSPECT:
        raise Replaced
    return _rate(arrivals)


def _rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes a second between the first of (when, bytes so far) and the last."""
    if len(arrivals) < 2:
        return 0.0
    (first_at, first), (last_at, last) = arrivals[0], arrivals[-1]
    return (last - first) / max(1e-6, last_at - first_at)


async def finish(link: Link) -> None:
    """Tells the serving side that all is done, and waits until it has heard that, LINK_CLOSE_SECONDS at most."""
    with contextlib.suppress(TimeoutError, PeerllmError):
        async with asyncio.timeout(limits.LINK_CLOSE_SECONDS):
            await _say_done(link, _ALL_MEASURED)


async def leave(link: Link) -> None:
    """Tells the other side, which would wait, that this one ends before all is done. LEAVE_SECONDS at most."""
    with contextlib.suppress(TimeoutError, PeerllmError):
        async with asyncio.timeout(LEAVE_SECONDS):
            await _say_done(link, _BROKEN_OFF)


async def _say_done(link: Link, number: int) -> None:
    """Until the other side has said so too. What becomes of the link from then on is no news."""
    link.on_state = None
    while True:
        epoch = link.epoch
        with contextlib.suppress(Replaced):
            await _say(link, _message(_DONE, number), epoch=epoch)
            while _parse(await _while_up(link, link.receive, EXCHANGE_SECONDS, epoch)).op != _DONE:
                pass  # a flood's last pieces may still come
            return


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all reach or stay below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]
