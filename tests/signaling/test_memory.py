"""The same as `test_bounds`, with a real process and real connections; run by `make test-full`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import psutil
import pytest
from peerllm_signaling import limits
from peerllm_signaling.server import PATH

OPEN = b'{"op":"open","token":"%s","seats":1}' % (b"00" * 16)


async def open_and_abandon(port: int, first: int, count: int) -> None:
    """Each address opens ten rooms, and leaves them at once."""

    async def one(index: int) -> None:
        address = f"10.{index // 10 // 250 // 250}.{index // 10 // 250 % 250}.{index // 10 % 250}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"GET {PATH} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {address}\r\nUpgrade: websocket\r\n".encode()
            + b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            + bytes([0x81, 0x80 | len(OPEN)])
            + bytes(4)
            + OPEN
        )
        await reader.readuntil(b'"opened"')
        writer.transport.abort()

    for start in range(first, first + count, 50):
        await asyncio.gather(*(one(index) for index in range(start, start + 50)))


@pytest.mark.full
@pytest.mark.skipif(not os.environ.get("PEERLLM_TEST_FULL"), reason="takes two minutes: run by make test-full")
@pytest.mark.timeout(900)
async def test_a_real_servers_memory_is_flat_after_100_000_rooms() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "peerllm_signaling", "--port", "0", "--log-level", "error"),
        *("--trusted-proxy", "127.0.0.1"),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    port = int((await process.stdout.readline()).decode().rsplit(":", 1)[1])
    server = psutil.Process(process.pid)
    resident = []
    for first in range(0, 100_000, 20_000):
        await open_and_abandon(port, first, 20_000)
        resident.append(server.memory_info().rss // limits.KIB)
    print("KiB after every 20,000 rooms:", *resident)
    process.terminate()
    assert await process.wait() == 0
    assert max(resident[3:]) - max(resident[:3]) < 8 * 1024
