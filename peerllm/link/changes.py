"""Waiting for "something changed", for any number of waiters at once."""

from __future__ import annotations

import asyncio


class Changes:
    """`happened` wakes whoever waits in `next` at that moment; each then looks for itself."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def happened(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def next(self) -> None:
        """Safe to cancel."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
