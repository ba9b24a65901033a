"""Bounds on the clients of the socket that aiohttp does not keep: how many, and how slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import structlog

from peerllm.api.errors import raw_response
from peerllm.protocol import limits
from peerllm.protocol.errors import Overloaded

log = structlog.get_logger()


class Connections:
    """Makes the protocol of each connection, and knows them all.

    Args:
        make_handler: makes aiohttp's protocol.
        max_clients: one more is answered 429 and closed. As many may wait for that answer; beyond them a connection is
            closed without a word.
        stall_seconds: a client that has not sent its first request's head, or has not emptied its socket, in so long is
            dropped. Bodies and the time between requests are bounded by the request handler and by aiohttp.
    """

    def __init__(self, make_handler: Callable[[], asyncio.Protocol], *, max_clients: int, stall_seconds: float) -> None:
        self._make_handler = make_handler
        self._max_clients = max_clients
        self._stall_seconds = stall_seconds
        self._clients: dict[asyncio.Transport, _Client] = {}
        self._refused: set[asyncio.Transport] = set()
        self._requests: set[asyncio.Task[object]] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    def __call__(self) -> asyncio.Protocol:
        return _Client(self)

    def request_began(self, transport: asyncio.Transport | None) -> None:
        """The head of a request has come in whole, and the current task serves it."""
        task = asyncio.current_task()
        if task is not None:
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        client = self._clients.get(transport) if transport is not None else None
        if client is not None:
            client.stop_timer()

    def admit(self, transport: asyncio.Transport, client: _Client) -> asyncio.Protocol | None:
        """aiohttp's protocol for a new connection, or None where there is no room for it."""
        if len(self._clients) >= self._max_clients:
            if len(self._refused) > self._max_clients:
                transport.abort()
            self._refused.add(transport)
            return None
        self._clients[transport] = client
        self._all_gone.clear()
        return self._make_handler()

    def forget(self, transport: asyncio.Transport) -> None:
        self._clients.pop(transport, None)
        self._refused.discard(transport)
        if not self._clients:
            self._all_gone.set()

    async def close(self) -> None:
        """Drops whoever is still there, with what they have not taken, and waits until nothing serves them."""
        for transport in [*self._clients, *self._refused]:
            transport.abort()
        await self._all_gone.wait()
        if self._requests:
            await asyncio.wait(self._requests)

    def crowded(self) -> bytes:
        return raw_response(Overloaded(f"This daemon serves {self._max_clients} connections at once; try again soon."))

    @property
    def stall_seconds(self) -> float:
        return self._stall_seconds

    def __len__(self) -> int:
        return len(self._clients)


class _Client(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, and drops a client that stalls."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport, always: uvloop's has asyncio's methods without being its subclass.
        self._transport = stream = cast(asyncio.Transport, transport)
        self._inner = self._connections.admit(stream, self)
        if self._inner is None:
            # A client that is refused before it asks may take that for a daemon that is not there: curl does.
            self._start_timer(limits.API_CROWDED_SECONDS, self._refuse)
            return
        # Then pause_writing means "not everything is in the client's hands", and nothing waits unseen in a buffer.
        stream.set_write_buffer_limits(high=0)
        self._start_timer(self._connections.stall_seconds, self._drop)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)
        else:
            self._refuse()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        self._start_timer(self._connections.stall_seconds, self._drop)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.stop_timer()
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        if self._transport is not None:
            self._connections.forget(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self.stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _refuse(self) -> None:
        self.stop_timer()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._connections.crowded())
            self._transport.close()

    def _drop(self) -> None:
        log.warning("api_client_dropped", stalled_seconds=self._connections.stall_seconds)
        if self._transport is not None:
            self._transport.abort()
