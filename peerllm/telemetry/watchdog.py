"""How long the event loop was blocked: pings, verdicts and clients all wait meanwhile."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import structlog

from peerllm.protocol import limits

log = structlog.get_logger()


class LoopWatchdog:
    """A timer that should fire every `interval` seconds and measures how late it comes.

    Being late is all that it sees: work on the loop, a blocking call, or a machine with no processor to spare. The
    thread's processor time in that interval, which the log event has, tells the first from the others.

    Use it as `async with LoopWatchdog() as watchdog:`, or with `start` and `stop`.
    """

    def __init__(
        self, *, threshold: float = limits.LOOP_BLOCKED_SECONDS, interval: float = limits.WATCHDOG_SECONDS
    ) -> None:
        self._threshold = threshold
        self._interval = interval
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._processor_before = 0.0
        self.worst = 0.0
        """The longest time that the loop was blocked, seconds; short by `interval` at most."""
        self.blocked_count = 0
        """How often it was blocked for longer than the threshold."""

    def start(self) -> None:
        """Begins to measure in the running loop, on the thread that calls this."""
        if self._handle is None:
            self._schedule()

    def stop(self) -> None:
        """Ends measuring; what is overdue at this moment is still counted."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._measure()

    def summary(self) -> dict[str, Any]:
        return {"worst_ms": round(self.worst * 1000, 3), "blocked_count": self.blocked_count}

    def _schedule(self) -> None:
        self._due = time.monotonic() + self._interval
        self._processor_before = time.thread_time()
        self._handle = asyncio.get_running_loop().call_later(self._interval, self._fired)

    def _fired(self) -> None:
        self._measure()
        self._schedule()

    def _measure(self) -> None:
        late = time.monotonic() - self._due
        self.worst = max(self.worst, late)
        if late > self._threshold:
            self.blocked_count += 1
            processor = time.thread_time() - self._processor_before
            # A loop that used little of the time was not blocked by its own work: the machine had no processor for it.
            level = log.warning if processor > late / 2 else log.info
            level("loop_blocked", blocked_ms=round(late * 1000, 1), processor_ms=round(processor * 1000, 1))

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
