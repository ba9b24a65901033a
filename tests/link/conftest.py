"""Two links in one process, over an in-memory room, under the guard of tests/conftest.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from tests.link.pair import Pair


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    """The daemon runs on uvloop, and so do these tests."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def guarded(nothing_is_left_behind: None) -> None:
    """Every test here."""


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """A pair over loopback, not started."""
    made = Pair()
    yield made
    await made.close()
