"""A server, a house of peers, and a guard that fails on anything left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from peerllm_signaling.server import SignalingServer

from peerllm.protocol import limits
from tests.rooms.house import House, signaling


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    """The daemon runs on uvloop, and so do these tests."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def nothing_is_left_behind() -> AsyncIterator[None]:
    """Fails on any exception that reaches the loop's handler, and on any task that outlives its test."""
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    before = asyncio.all_tasks()
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()  # "Task exception was never retrieved" is told by the garbage collector
    leaked = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task() and not task.done()]
    assert not reported, reported
    assert not leaked, leaked


@pytest.fixture
async def server(nothing_is_left_behind: None) -> AsyncIterator[SignalingServer]:
    async with signaling() as made:
        yield made


@pytest.fixture
async def house(server: SignalingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(limits, "ROOM_MISSING_SECONDS", 0.0)  # no server was started anew, but where a test does it
    made = House(server.address, tmp_path)
    yield made
    await made.close()
