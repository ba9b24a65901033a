"""A longer path on one machine: datagrams that leave late, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class DelayLine:
    """Holds datagrams back for a fixed time; since it is the same for all, a queue and one timer are enough."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[tuple[float, Any, bytes, Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, transport: asyncio.DatagramTransport, data: bytes, address: Any) -> None:
        self._waiting.append((self._loop.time() + self._seconds, transport, data, address))
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._release)

    def _release(self) -> None:
        self._timer = None
        # A timer of the loop may fire up to its resolution early; what is due within it goes along.
        now = self._loop.time() + 0.001
        while self._waiting and self._waiting[0][0] <= now:
            _, transport, data, address = self._waiting.popleft()
            if not transport.is_closing():
                transport.sendto(data, address)
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._release)

    def flush(self) -> None:
        """Everything leaves now: the sockets are about to close, and the last words have to be said."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, transport, data, address = self._waiting.popleft()
            if not transport.is_closing():
                transport.sendto(data, address)


class DelayedTransport:
    """A datagram transport whose datagrams pass a delay line; everything else is the wrapped one's."""

    def __init__(self, inner: asyncio.DatagramTransport, line: DelayLine) -> None:
        self._inner = inner
        self._line = line

    def sendto(self, data: bytes, addr: Any = None) -> None:
        self._line.send(self._inner, data, addr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
