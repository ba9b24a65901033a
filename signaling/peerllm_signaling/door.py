"""Before a connection is a WebSocket: no client may hold a descriptor without soon becoming one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from peerllm_signaling import limits


class Door:
    """Makes the protocol of each connection that is accepted, and shows out who does not say in time what it wants.

    aiohttp waits for ever for the first request's headers.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make
        self._waiting: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def __call__(self) -> asyncio.Protocol:
        protocol = self._make()
        loop = asyncio.get_running_loop()
        self._waiting[protocol] = loop.call_later(limits.REQUEST_SECONDS, self._show_out, protocol)
        return protocol

    def let_in(self, protocol: asyncio.BaseProtocol) -> None:
        """It is a WebSocket now, which has rules of its own."""
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def _show_out(self, protocol: asyncio.BaseProtocol) -> None:
        del self._waiting[protocol]
        transport = cast("asyncio.WriteTransport | None", getattr(protocol, "transport", None))
        if transport is not None:
            transport.abort()
