"""A switchboard, a real server, under the guard of tests/conftest.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from peerllm_signaling.server import ServerConfig, SignalingServer

from tests.signaling.board import Board


@pytest.fixture
def board() -> Board:
    return Board()


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
