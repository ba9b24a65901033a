"""The engine as the daemon uses it: a worker that is restarted when it dies, with the same layers loaded again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import structlog

from peerllm.daemon.worker_process import Reply, WorkerProcess
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerllmError, RoomIncomplete, WorkerDied

log = structlog.get_logger(__name__)

_FIRST_PAUSE = 0.2
_LAST_PAUSE = 10.0


class Engine:
    """Calls go to the worker of the moment. After `load`, a worker that dies is replaced and loads the same again; its
    successor knows no sessions, and `restarts` tells it from the one before.

    `on_lost(error)` is called when a loaded worker is gone, `on_restored()` when its successor is ready.
    """

    def __init__(
        self,
        *,
        on_progress: Callable[[str, float], None],
        on_lost: Callable[[PeerllmError], None],
        on_restored: Callable[[], None],
        make_worker: Callable[..., WorkerProcess] = WorkerProcess,
    ) -> None:
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._make_worker = make_worker
        self._worker: WorkerProcess | None = None
        self._load: dict[str, Any] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Clear while a lost worker's successor may still come."""
        self._settled.set()
        self._failure: PeerllmError | None = None
        self._closed = False
        self.loaded: dict[str, Any] | None = None
        """What `load` answered; None while nothing is loaded."""
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    @property
    def beat_age(self) -> float | None:
        return None if self._worker is None or self._worker.failure is not None else self._worker.beat_age

    @property
    def state(self) -> str:
        if self._worker is None:
            return "absent"
        if self._restarting is not None:
            return "restarting"
        return "ready" if self.loaded is not None else "idle"

    async def start(self) -> None:
        self._worker = self._make_worker(on_progress=self._on_progress, on_exit=self._worker_gone)
        await self._worker.start()

    async def call(self, op: str, payload: bytes = b"", *, deadline: float | None = None, **arguments: Any) -> Reply:
        """See WorkerProcess.call."""
        if self._worker is None:
            raise RoomIncomplete("the engine is not running yet")
        return await self._worker.call(op, payload, deadline=deadline, **arguments)

    async def plan(self, **arguments: Any) -> dict[str, Any]:
        """What would fit, were it loaded. The worker gives up what it holds first, as for `load`."""
        if self._load is not None:
            await self._settled.wait()
        self.loaded = None
        return (await self.call("plan", **arguments)).values

    async def load(self, **arguments: Any) -> dict[str, Any]:
        """Loads this peer's layers; remembered for the worker's successors."""
        if self._load is not None:
            await self._settled.wait()  # a worker that is being restarted loads already
            if self.loaded is not None and self._load == arguments:
                return self.loaded
        # The worker gives up what it holds before it loads; where that fails, nothing is loaded any more.
        self.loaded = None
        reply = await self.call("load", **arguments)
        self._load = arguments
        self.loaded = reply.values
        return reply.values

    async def until_loaded(self) -> dict[str, Any]:
        """What `load` answered, as soon as there is a worker that has loaded.

        Raises:
            PeerllmError: nothing is loaded, or MAX_FAILED_RESTARTS in a row have failed: the last one's reason.
        """
        await self._settled.wait()
        if self.loaded is None:
            raise self._failure or RoomIncomplete("no layers are loaded yet")
        return self.loaded

    async def close(self) -> None:
        self._closed = True
        self._failure = WorkerDied("the daemon is stopping")
        self._settled.set()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()

    def _worker_gone(self, error: PeerllmError) -> None:
        if self._closed:
            return
        was_loaded, self.loaded = self.loaded is not None, None
        if was_loaded:
            self._settled.clear()
            self._on_lost(error)
        if self._restarting is None:
            self._restarting = asyncio.create_task(self._restart(), name="worker-restart")

    async def _restart(self) -> None:
        pause = _FIRST_PAUSE
        for failures in itertools.count(1):
            if self._worker is not None:
                await self._worker.close()
            self.restarts += 1
            try:
                await self.start()
                if self._load is not None:
                    self.loaded = (await self.call("load", **self._load)).values
                break
            except WorkerDied as error:
                self._failure = error
                log.warning("worker_restart_failed", reason=error.message, pause=pause)
            except PeerllmError as error:
                # The worker lives and says no (memory taken by another program, a file gone): try again, less often.
                self._failure = error
                log.warning("worker_reload_failed", reason=error.message, pause=pause)
            if failures >= limits.MAX_FAILED_RESTARTS:
                self._settled.set()  # whoever waits is told; the tries go on
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        self._restarting = None
        log.info("worker_restored", restarts=self.restarts)
        if self.loaded is not None:
            self._settled.set()
            self._on_restored()
