"""What all tests share: which of them want the machine for themselves."""

from __future__ import annotations

import signal

import pytest

# Where tests run in the background of a script, Ctrl-C is ignored, and processes that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE = ("tests/lab/", "tests/e2e/test_event_loop.py", "tests/rooms/test_flood.py", "tests/rooms/test_meddling_link.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
