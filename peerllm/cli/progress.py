"""What takes long says so: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from peerllm.cli.terminal import printable
from peerllm.protocol import limits

_REWRITES_A_SECOND = 10
_QUARTERS = 4
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Shows stages and how far each is.

    On a terminal one line is rewritten, and `done` erases it. Elsewhere a stage gets a line when it begins and at each
    quarter, without control characters. `update` may be called as often as one likes, from one thread at a time.

    Args:
        stream: where; standard error unless given.
        clock: seconds, for tests.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._clock = clock
        self._stage = ""
        self._stage_began = 0.0
        self._quarter = 0
        self._last_write = float("-inf")
        self._has_line = False

    def update(self, stage: str, fraction: float | None = None) -> None:
        """`stage` in words; `fraction` 0 to 1, or None where nobody knows."""
        stage = printable(stage).replace("\n", " ")
        now = self._clock()
        is_new = stage != self._stage
        if is_new:
            self._stage, self._stage_began, self._quarter = stage, now, 0
        share = None if fraction is None else min(max(fraction, 0.0), 1.0)
        if self._on_terminal:
            self._rewrite(share, now, is_new=is_new)
            return
        quarter = 0 if share is None else int(share * _QUARTERS)
        if is_new or quarter > self._quarter:
            self._quarter = quarter
            self._write(f"{stage}{_percent(share)}\n")

    def done(self, message: str | None = None) -> None:
        """Clears the line on a terminal, and leaves `message` where there is one."""
        self.clear()
        self._stage = ""
        if message is not None:
            self._write(printable(message) + "\n")

    def clear(self) -> None:
        """Makes room for other output; the next `update` shows the stage again."""
        if self._has_line:
            self._has_line = False
            self._last_write = float("-inf")
            self._write(_ERASE_LINE)

    def _rewrite(self, share: float | None, now: float, *, is_new: bool) -> None:
        is_due = now - self._last_write >= 1 / _REWRITES_A_SECOND
        if not (is_new or is_due or share == 1.0):
            return
        self._last_write = now
        self._has_line = True
        elapsed = now - self._stage_began
        seconds = f" {elapsed:.0f} s" if elapsed >= limits.PROGRESS_SECONDS else ""
        self._write(f"{_ERASE_LINE}{self._stage}{_percent(share)}{seconds}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Waiting:
    """Shows `stage` while the caller blocks: `with Waiting("…") as waiting:`, and `stop` as soon as something comes.

    Shows nothing for what takes less than `limits.PROGRESS_SECONDS`.
    """

    def __init__(self, stage: str, progress: Progress, *, seconds: float = limits.PROGRESS_SECONDS) -> None:
        self._stage = stage
        self._progress = progress
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def stop(self) -> None:
        """May be called twice."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._progress.done()

    def _show(self) -> None:
        while not self._over.wait(self._seconds):
            self._progress.update(self._stage)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _percent(share: float | None) -> str:
    return "" if share is None else f" {share:.0%}"
