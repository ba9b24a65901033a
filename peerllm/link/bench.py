"""How long a block takes over a link, in both directions: `peerllm bench link` is this over a room.

One side measures, the other serves until it is told that all is done. A block out is answered with 16 bytes; a block in
is asked for with 16 bytes; so both take one round trip, and the block's bytes go one way.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from typing import Any

from peerllm.link.config import Urgency
from peerllm.link.link import Link
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, ProtocolError

SIZES = (16, 1_000, 4_000, 16_000, 32_000, 64_000, 128_000, 200_000, 262_144)
SAMPLES = 200
_HEADER = struct.Struct("!BIQ3x")
_ECHO, _ASK, _BLOCK, _BULK, _BULK_TAKEN, _DONE = range(6)
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
    while True:
        op, number, size = _parse(await link.receive())
        if op == _DONE:
            return
        if op == _ECHO:
            await link.send(_message(_BLOCK, number))
        elif op == _ASK and size <= limits.MAX_MESSAGE_BYTES:
            await link.send(_message(_BLOCK, number, length=size))
        elif op == _BULK:
            taken = size if number == 0 else taken + size
            await link.send(_message(_BULK_TAKEN, number, taken), Urgency.CONTROL)


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


async def finish(link: Link) -> None:
    """Tells the serving side that all is done, and gives it time to hear it."""
    await link.send(_message(_DONE, 0))
    try:
        async with asyncio.timeout(limits.LINK_CLOSE_SECONDS):
            await link.receive()
    except (TimeoutError, PeerAway):
        return


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all reach or stay below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]
