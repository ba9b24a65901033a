"""A flood of strangers, and silent claims on the pair's own number, while a real pair connects."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rooms.house import House, connect

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
async def far_server(nothing_is_left_behind: None) -> AsyncIterator[int]:
    """A signaling server in a process of its own; gives its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "peerllm_signaling", "--port", "0", "--log-level", "error", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    yield int(line.decode().rsplit(":", 1)[1])
    process.terminate()
    assert await process.wait() == 0


@pytest.mark.timeout(400)
async def test_a_pair_connects_within_five_seconds_through_a_flood(far_server: int, tmp_path: Path) -> None:
    took: list[float] = []
    while len(took) < 3 and (not took or took[-1] >= 5):  # a machine that is busy with something else may add its own
        took.append(await seconds_through_a_flood(far_server, tmp_path / str(len(took))))
    print(f"connected after {took} s")
    assert took[-1] < 5


async def seconds_through_a_flood(port: int, folder: Path) -> float:
    """From the claim to an attempt that both ends have, while the flood goes on. It has to be one to its end."""
    house = House(f"ws://127.0.0.1:{port}", folder)
    guesses: list[int] = []
    try:
        room = await house.open(house.client("a"), on_guess=lambda count, _: guesses.append(count))
        flood = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.rooms.flood", str(port), str(room.code.number)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert flood.stdout is not None
        assert await flood.stdout.readline() == b"begun\n"
        begun = time.monotonic()
        one, two = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
        house.keep(one), house.keep(two)
        await connect(*((one, two) if one.is_controlling else (two, one)))
        seconds = time.monotonic() - begun
        output, _ = await flood.communicate(b"")
    finally:
        await house.close()
    assert int(output) > 9_000
    assert guesses == []
    return seconds
