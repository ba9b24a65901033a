"""`python -m tests.rooms.flood PORT ROOM`: strangers from a thousand addresses of 127.0.0.0/8, until stdin ends.

Ten thousand claims at random numbers, and on the room's own number claims that greet properly and then say nothing,
again and again. Prints `begun` once a thousand claims were answered, and at the end how many were.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import sys

from spake2 import SPAKE2_B

from peerllm.rooms import wire

CLAIMS, ADDRESSES, SILENT_ADDRESSES, AT_ONCE = 10_000, 1_000, 60, 60
HANDSHAKE = (
    b"GET /v1 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def claim(room: int, greeting: str) -> bytes:
    """A masked text frame; the mask is zero."""
    body = json.dumps({"op": "claim", "room": room, "greeting": greeting}).encode()
    return bytes([0x81, 0x80 | 126]) + len(body).to_bytes(2) + bytes(4) + body


async def say(port: int, address: str, frame: bytes, *, until_dropped: bool) -> int:
    """One claim from that address; the bytes that came in answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(HANDSHAKE + frame)
        await reader.readuntil(b"\r\n\r\n")
        return len(await reader.read() if until_dropped else await reader.read(100))
    finally:
        writer.transport.abort()


async def flood(port: int, room: int) -> None:
    answered = 0
    begun = asyncio.Event()
    greeting = base64.b64encode(wire.pack_greeting(wire.VERSIONS, SPAKE2_B(b"wrong").start())).decode()
    numbers = random.Random(1)

    async def at_random(first: int) -> None:
        nonlocal answered
        for index in range(first, CLAIMS, AT_ONCE):
            address = f"127.1.{index % ADDRESSES // 250}.{1 + index % ADDRESSES % 250}"
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                frame = claim(numbers.randrange(1000, 10_000), greeting)
                was_answered = await say(port, address, frame, until_dropped=False) > 0
                answered += was_answered
            if answered > 1000:
                begun.set()

    async def silently(index: int) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await say(port, f"127.2.0.{1 + index}", claim(room, greeting), until_dropped=True)
            await asyncio.sleep(0.5)

    silent = [asyncio.create_task(silently(index)) for index in range(SILENT_ADDRESSES)]
    strangers = asyncio.gather(*(at_random(first) for first in range(AT_ONCE)))
    await begun.wait()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await strangers
    await asyncio.to_thread(sys.stdin.read)
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    sys.stdout.write(f"{answered}\n")


if __name__ == "__main__":
    asyncio.run(flood(int(sys.argv[1]), int(sys.argv[2])))
