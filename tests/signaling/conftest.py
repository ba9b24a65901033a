"""A switchboard, a real server, and a guard that fails on anything left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from peerllm_signaling.server import ServerConfig, SignalingServer

from tests.signaling.board import Board


@pytest.fixture
def board() -> Board:
    return Board()


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
    server = SignalingServer(ServerConfig("127.0.0.1", 0))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def session(nothing_is_left_behind: None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
