"""Without root, or without its tools, the lab's tests are skipped with the reason; where they must run, that fails."""

from __future__ import annotations

import os

import pytest

from tests.lab.net import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("PEERLLM_TEST_FULL"):
        for item in items:
            if item.get_closest_marker("full") is not None:
                item.add_marker(pytest.mark.skip(reason="one of many like it: run by make test-full"))
    reason = missing()
    if reason is None:
        return
    if os.environ.get("PEERLLM_TEST_ROOT") == "required":
        raise pytest.UsageError(f"these tests must not be skipped here: {reason}")
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
