"""The event loop's watchdog."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog

from peerllm.protocol import limits
from peerllm.telemetry.watchdog import LoopWatchdog


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_blocked_loop_is_measured_and_logged() -> None:
    with structlog.testing.capture_logs() as events:
        async with LoopWatchdog() as watchdog:
            await asyncio.sleep(0.02)
            block(0.12)
            await asyncio.sleep(0.02)
    assert watchdog.worst >= 0.12 - limits.WATCHDOG_SECONDS - 0.001
    assert watchdog.blocked_count >= 1
    assert any(event["event"] == "loop_blocked" and event["blocked_ms"] > 100 for event in events)


async def test_a_loop_that_is_blocked_to_the_end_is_measured_too() -> None:
    with structlog.testing.capture_logs():
        async with LoopWatchdog() as watchdog:
            block(0.1)
    assert watchdog.worst > limits.LOOP_BLOCKED_SECONDS
    assert watchdog.blocked_count == 1


async def test_work_tells_itself_from_waiting_by_the_processors_time() -> None:
    with structlog.testing.capture_logs() as events:
        async with LoopWatchdog() as watchdog:
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
            await asyncio.sleep(0.02)
            worked = list(events)
            block(0.3)
            await asyncio.sleep(0.02)
    assert max(event["processor_ms"] for event in worked) > 80
    waited = max(events[len(worked) :], key=lambda event: event["blocked_ms"])
    assert waited["processor_ms"] < 50
    assert watchdog.summary()["blocked_count"] == watchdog.blocked_count == len(events)


async def test_a_free_loop_gives_no_alarm() -> None:
    with structlog.testing.capture_logs() as events:
        async with LoopWatchdog(threshold=5.0) as watchdog:
            await asyncio.sleep(0.05)
    assert watchdog.blocked_count == 0
    assert 0 <= watchdog.worst < 5.0
    assert events == []


async def test_it_leaves_nothing_behind() -> None:
    watchdog = LoopWatchdog()
    watchdog.start()
    watchdog.start()
    watchdog.stop()
    watchdog.stop()
    worst = watchdog.worst
    block(0.02)
    await asyncio.sleep(0.02)
    assert watchdog.worst == worst
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("seconds", [0.06, 0.2])
async def test_the_measure_is_short_by_one_interval_at_most(seconds: float) -> None:
    with structlog.testing.capture_logs():
        async with LoopWatchdog(interval=0.005) as watchdog:
            await asyncio.sleep(0.011)
            began = time.monotonic()
            block(seconds)
            blocked = time.monotonic() - began
            await asyncio.sleep(0.02)
    assert watchdog.worst >= blocked - 0.006
