"""Puts the API's parts together: listener, connections, handlers."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Self

from aiohttp import web

from peerllm.api.answers import Answers
from peerllm.api.backend import Backend
from peerllm.api.connections import Connections
from peerllm.api.handlers import Handlers, application
from peerllm.api.listener import Listener
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerllmError


class Server:
    """A running API. Made by `serve`; `close`, or leaving `async with`, ends it."""

    def __init__(
        self, listener: Listener, runner: web.AppRunner, answers: Answers, connections: Connections,
        server: asyncio.AbstractServer,
    ) -> None:  # fmt: skip
        self._listener = listener
        self._runner = runner
        self._answers = answers
        self._connections = connections
        self._server = server
        self._is_closed = False

    @property
    def path(self) -> str:
        return os.fspath(self._listener.path)

    @property
    def clients(self) -> int:
        """Connections now open."""
        return len(self._connections)

    async def close(self) -> None:
        """Takes no new clients, ends running answers with an error that says so, and removes the socket. May be called
        twice. Takes `limits.API_CLOSE_SECONDS` if a client does not take its last event, and half of it more if the
        backend does not end its answers."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.close()
        self._answers.stop_all(DaemonStopping("The daemon was stopped before the answer was complete."))
        try:
            await self._runner.cleanup()
            await self._answers.wait_closed(limits.API_CLOSE_SECONDS / 2)
            await self._connections.close()
            await self._server.wait_closed()
        finally:
            self._listener.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class DaemonStopping(PeerllmError):
    code = "daemon_stopping"
    status = 503


async def serve(
    backend: Backend,
    socket_path: str | os.PathLike[str],
    *,
    group: str | None = None,
    max_clients: int = limits.MAX_API_CLIENTS,
    stall_seconds: float = limits.CLIENT_STALL_SECONDS,
    keepalive_seconds: float = limits.SSE_KEEPALIVE_SECONDS,
) -> Server:
    """Serves `backend` on a Unix socket at `socket_path`, mode 0600, or 0660 for a named `group`.

    Raises:
        SocketError: the path cannot be had: another daemon has it, it is not a socket, it is too long, …
    """
    listener = Listener(socket_path, group=group)
    try:
        answers = Answers()
        handlers = Handlers(backend, answers, keepalive_seconds=keepalive_seconds, stall_seconds=stall_seconds)
        connections = Connections(
            lambda: _aiohttp_protocol(runner), max_clients=max_clients, stall_seconds=stall_seconds
        )
        runner = web.AppRunner(
            application(handlers, connections.request_began),
            handler_cancellation=True,  # a client that goes away ends its answer
            keepalive_timeout=stall_seconds,
            shutdown_timeout=limits.API_CLOSE_SECONDS / 2,  # aiohttp waits for it twice
            auto_decompress=False,
            access_log=None,
        )
        await runner.setup()
        server = await asyncio.get_running_loop().create_unix_server(connections, sock=listener.socket)
    except BaseException:
        listener.close()
        raise
    return Server(listener, runner, answers, connections, server)


def _aiohttp_protocol(runner: web.AppRunner) -> asyncio.Protocol:
    if runner.server is None:
        raise RuntimeError("aiohttp's runner is not set up, or closed")
    return runner.server()
