"""Who is served next: first in, first out, bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from peerllm.protocol import limits
from peerllm.protocol.errors import Overloaded


class RequestQueue:
    """One request is served at a time; the others wait in the order in which they came."""

    def __init__(self, max_waiting: int = limits.MAX_QUEUED_REQUESTS) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return int(self._is_taken)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for this request's turn. Cancelling while waiting gives the place up.

        Raises:
            Overloaded: too many wait already.
        """
        if self._is_taken:
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} requests wait already; try again in a while")
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._pass_on()  # the turn had come already
                elif mine in self._waiting:
                    self._waiting.remove(mine)
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                return  # stays taken: nobody can slip in between
        self._is_taken = False
