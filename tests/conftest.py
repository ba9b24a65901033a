"""What all tests share: which of them want the machine for themselves, and a guard over what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

# Where tests run in the background of a script, Ctrl-C is ignored, and processes that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE = ("tests/lab/", "tests/e2e/test_event_loop.py", "tests/rooms/test_flood.py", "tests/rooms/test_meddling_link.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)


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
