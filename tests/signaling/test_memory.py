"""The same as `test_bounds`, with a real process and real connections; run by `make test-full`."""

from __future__ import annotations

import asyncio
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
            f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"X-Forwarded-For: {address}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            + bytes([0x81, 0x80 | len(OPEN)])
            + bytes(4)
            + OPEN
        )
        await reader.readuntil(b'"opened"')
        writer.transport.abort()

    for start in range(first, first + count, 50):
        await asyncio.gather(*(one(index) for index in range(start, start + 50)))


@pytest.mark.full
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
    await open_and_abandon(port, 0, 50_000)
    before = server.memory_info().rss
    await open_and_abandon(port, 50_000, 50_000)
    after = server.memory_info().rss
    print(f"{before / limits.KIB / 1024:.1f} MiB after 50,000 rooms, {after / limits.KIB / 1024:.1f} MiB after 100,000")
    process.terminate()
    assert await process.wait() == 0
    assert after - before < 4 * 1024 * limits.KIB
