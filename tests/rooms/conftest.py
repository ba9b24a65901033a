"""A server, a house of peers, under the guard of tests/conftest.py."""

from __future__ import annotations

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
async def server(nothing_is_left_behind: None) -> AsyncIterator[SignalingServer]:
    async with signaling() as made:
        yield made


@pytest.fixture
async def house(server: SignalingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(limits, "ROOM_MISSING_SECONDS", 0.0)  # no server was started anew, but where a test does it
    made = House(server.address, tmp_path)
    yield made
    await made.close()
