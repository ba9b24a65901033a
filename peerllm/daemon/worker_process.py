"""The engine worker as the daemon sees it: a child process that answers calls over a socket pair, or is replaced.

The worker computes one call at a time, in order. It beats from a thread of its own; silence, death and a call that runs
past its deadline all end the process and every call that waits, with a typed error. EOF on its end of the pair ends the
worker, so it cannot outlive the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from peerllm.protocol import limits
from peerllm.protocol.errors import EngineError, PeerllmError, ProtocolError, WorkerDied, WorkerHung, error_from_code
from peerllm.protocol.pipe import FrameReader, encode_frame

log = structlog.get_logger(__name__)

_READ_BYTES = 256 * limits.KIB
_WATCH_SECONDS = 1.0
DEFAULT_COMMAND = (sys.executable, "-m", "peerllm.engine.worker")


@dataclass(frozen=True, slots=True)
class Reply:
    values: dict[str, Any]
    payload: bytes


class WorkerProcess:
    """One life of a worker. `on_progress(stage, fraction)` reports what takes long; `on_exit(error)` is called once."""

    def __init__(
        self,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        on_exit: Callable[[PeerllmError], None] | None = None,
        command: Sequence[str] = DEFAULT_COMMAND,
        hung_seconds: float = limits.WORKER_HUNG_SECONDS,
    ) -> None:
        self._on_progress = on_progress
        self._on_exit = on_exit
        self._command = command
        self._hung_seconds = hung_seconds
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._failure: PeerllmError | None = None
        self._closing = False
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._write_lock = asyncio.Lock()
        self._last_beat = time.monotonic()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def beat_age(self) -> float:
        """Seconds since the worker was last heard."""
        return time.monotonic() - self._last_beat

    @property
    def failure(self) -> PeerllmError | None:
        """Why it is gone; None while it lives."""
        return self._failure

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                # Ctrl-C on the terminal is the daemon's to handle; the worker goes when its pipe closes.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._last_beat = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._read(reader), name="worker-read"),
            asyncio.create_task(self._watch(), name="worker-watch"),
        ]

    async def call(self, op: str, payload: bytes = b"", *, deadline: float | None = None, **arguments: Any) -> Reply:
        """One op of docs/architecture.md. Cancelling gives up the answer; the worker still computes it.

        Raises:
            WorkerDied, WorkerHung: the worker is gone, or the `deadline` in seconds has passed (which ends it).
            PeerllmError: what the worker answered.
        """
        if self._failure is not None:
            raise self._failure
        if self._writer is None:
            raise EngineError("the engine worker has not been started")
        number = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with self._write_lock:
                for buffer in encode_frame({"op": op, "id": number, **arguments}, payload):
                    self._writer.write(buffer)
                with contextlib.suppress(ConnectionError):  # the reader finds out why
                    await self._writer.drain()
            try:
                async with asyncio.timeout(deadline):
                    return await future
            except TimeoutError:
                error = WorkerHung(f"the engine worker did not finish '{op}' within {deadline:.0f} s; it is restarted")
                self._fail(error)
                raise error from None
        finally:
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # seen here, even when the call was cancelled

    async def close(self) -> None:
        """Ends the process and waits for it; at most 2 s."""
        self._closing = True
        self._fail(WorkerDied("the daemon is stopping"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        try:
            while data := await reader.read(_READ_BYTES):
                self._last_beat = time.monotonic()
                for header, payload in frames.feed(data):
                    self._take(header, payload)
        except (ConnectionError, ProtocolError) as error:
            log.warning("worker_pipe_broken", error=str(error))
        code = await self._process.wait() if self._process is not None else None
        self._fail(WorkerDied(f"the engine worker ended unexpectedly ({_exit_words(code)}); it is restarted"))

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        event = header.get("event")
        if event == "progress" and self._on_progress is not None:
            self._on_progress(str(header.get("stage", "")), float(header.get("fraction", 0.0)))
        if event is not None:
            return
        future = self._waiting.get(header.get("id", 0))
        if future is None or future.done():
            return
        if error := header.get("error"):
            future.set_exception(error_from_code(error["code"], error["message"], error.get("param")))
        else:
            future.set_result(Reply(header.get("ok") or {}, payload))

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            if time.monotonic() - before > 2 * _WATCH_SECONDS:
                continue  # it is we who were stopped: beats may wait unread
            if self.beat_age > self._hung_seconds:
                self._fail(WorkerHung(f"the engine worker was silent for {self.beat_age:.0f} s; it is restarted"))
                return

    def _fail(self, error: PeerllmError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # it may be stopped: nothing gentler is sure to work
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        if not self._closing:
            log.warning("worker_gone", error=error.code, reason=error.message)
            if self._on_exit is not None:
                self._on_exit(error)


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        # The kernel's way to get memory back, and hardly anybody else's.
        reason = ", as when memory runs out" if -code == signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{reason}"
    return f"exit status {code}"
