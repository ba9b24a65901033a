"""The aiohttp shell around the switchboard: sockets, clocks, queues."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from peerllm_signaling import limits, log, proxies
from peerllm_signaling.budgets import Bucket, address_group
from peerllm_signaling.door import Door
from peerllm_signaling.line import POLICY, TRY_LATER
from peerllm_signaling.stun import StunResponder, stun_budgets
from peerllm_signaling.switchboard import Client, Switchboard
from peerllm_signaling.turn import TurnServers

PATH = "/v1"
_TICK_SECONDS = 0.25
_EVENTS = log.get()


@dataclass(frozen=True)
class ServerConfig:
    host: str
    port: int
    stun_port: int | None = None
    """The first of two UDP ports; None: the WebSocket's own number and the next, or any if these are taken."""
    has_stun: bool = True
    tls: ssl.SSLContext | None = None
    trusted_proxies: tuple[proxies.Network, ...] = ()
    turn: TurnServers | None = None


class SocketLine:
    """A WebSocket as the state machines see it: a bounded queue that one task empties."""

    def __init__(self, socket: web.WebSocketResponse, group: str, abort: Callable[[], None]) -> None:
        self.group = group
        self._socket = socket
        self._abort = abort
        self._queue: deque[str | bytes] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._farewell: tuple[int, str] | None = None

    def send(self, data: str | bytes) -> None:
        if self._farewell is not None:
            return
        self._queue.append(data)
        self._bytes += len(data)
        if self._bytes > limits.MAX_QUEUED_BYTES or len(self._queue) > limits.MAX_QUEUED_MESSAGES:
            _EVENTS.info("slow_reader", address=log.masked(self.group))
            self._queue.clear()
            self._farewell = (POLICY, "too slow")
            self._abort()
        self._wake.set()

    @property
    def is_closing(self) -> bool:
        return self._farewell is not None

    def drop(self, code: int, reason: str) -> None:
        if self._farewell is None:
            self._farewell = (code, reason)
            self._wake.set()

    async def run(self) -> None:
        """Writes until the line is dropped or its socket breaks."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                data = self._queue.popleft()
                self._bytes -= len(data)
                if isinstance(data, str):
                    await self._socket.send_str(data)
                else:
                    await self._socket.send_bytes(data)
            if self._farewell is not None:
                code, reason = self._farewell
                await self._socket.close(code=code, message=reason.encode()[:100])
                return


class SignalingServer:
    """`await start()`, then `address`; `await stop()` says farewell to all and ends within about a second."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = config.port
        self.stun_ports: tuple[int, ...] = ()
        self.switchboard = Switchboard(
            lambda low, high: low + secrets.randbelow(high - low),
            servers=lambda: {"stun": list(self.stun_ports)},
            turn=lambda: None if config.turn is None else config.turn.credentials(time.time()),
        )
        self._lines: set[SocketLine] = set()
        self._by_group: Counter[str] = Counter()
        self._transports: list[asyncio.BaseTransport] = []
        self._ticker: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None
        self._listener: asyncio.Server | None = None
        self._draining = False

    @property
    def address(self) -> str:
        scheme = "ws" if self.config.tls is None else "wss"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{scheme}://{host}:{self.port}"

    async def start(self) -> None:
        """Raises OSError when a port is taken."""
        app = web.Application(client_max_size=1024)
        app.router.add_get(PATH, self._serve)
        app.router.add_get("/healthz", self._healthz)
        quiet = logging.getLogger("peerllm_signaling.http")
        quiet.propagate = False
        quiet.handlers = [log.Bridge()]
        self._runner = web.AppRunner(
            app, access_log=None, logger=quiet, handle_signals=False, shutdown_timeout=limits.DRAIN_SECONDS,
            max_line_size=4096, max_field_size=4096, max_headers=64,
        )  # fmt: skip
        await self._runner.setup()
        if self._runner.server is None:
            raise RuntimeError("aiohttp's runner was set up and has no server")
        self._door = Door(self._runner.server)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._door, self.config.host, self.config.port, backlog=1024, ssl=self.config.tls,
                ssl_handshake_timeout=limits.REQUEST_SECONDS if self.config.tls else None,
            )  # fmt: skip
            self.port = self._listener.sockets[0].getsockname()[1]
            if self.config.has_stun:
                await self._start_stun()
        except OSError:
            await self.stop()
            raise
        self._ticker = asyncio.create_task(self._tick(), name="signaling tick")

    async def _start_stun(self) -> None:
        budgets = stun_budgets()
        first = self.port if self.config.stun_port is None else self.config.stun_port
        ports = []
        for wanted in (first, first + 1):
            try:
                port = await self._listen_udp(wanted, budgets)
            except (OSError, OverflowError):  # taken, or there is no port after 65535
                if self.config.stun_port is not None:
                    raise
                port = await self._listen_udp(0, budgets)
            ports.append(port)
        self.stun_ports = tuple(ports)

    async def _listen_udp(self, port: int, budgets: Any) -> int:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: StunResponder(budgets), local_addr=(self.config.host, port)
        )
        self._transports.append(transport)
        return int(transport.get_extra_info("sockname")[1])

    async def stop(self) -> None:
        """Clients are told to come back later; what does not close in time is cut."""
        self._draining = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._door is not None:
            self._door.close()
        for transport in self._transports:
            transport.close()
        for line in list(self._lines):
            line.drop(WSCloseCode.SERVICE_RESTART, "restarting")
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.switchboard.tick(time.monotonic())

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._draining else 200, text="draining\n" if self._draining else "ok\n")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        # A header may come as several lines, and then means all of them in their order (RFC 9110 section 5.3).
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ()))
        group = address_group(proxies.client_address(request.remote or "", forwarded, self.config.trusted_proxies))
        if (
            self._draining
            or len(self._lines) >= limits.MAX_CONNECTIONS
            or self._by_group[group] >= limits.MAX_CONNECTIONS_PER_ADDRESS
        ):
            return web.Response(status=503, text="too many connections\n", headers={"Retry-After": "5"})
        socket = web.WebSocketResponse(
            max_msg_size=limits.MAX_FRAME_BYTES, heartbeat=limits.HEARTBEAT_SECONDS, compress=False, timeout=1.0
        )
        if not socket.can_prepare(request).ok:
            return web.Response(status=426, text="this is peerllm's signaling server; it speaks WebSocket\n")
        self._by_group[group] += 1
        try:
            await socket.prepare(request)
            if self._door is not None:
                self._door.let_in(request.protocol)
            await self._converse(request, socket, group)
        finally:
            self._by_group[group] -= 1
            if not self._by_group[group]:
                del self._by_group[group]
        return socket

    async def _converse(self, request: web.Request, socket: web.WebSocketResponse, group: str) -> None:
        transport = request.transport

        def abort() -> None:
            if transport is not None and isinstance(transport, asyncio.WriteTransport):
                transport.abort()

        line = SocketLine(socket, group, abort)
        client = Client(line)
        self._lines.add(line)
        if self._draining:
            line.drop(TRY_LATER, "restarting")
        writer = asyncio.create_task(line.run(), name="signaling writer")
        deadline = asyncio.get_running_loop().call_later(limits.SILENT_SECONDS, _drop_silent, client)
        frames = Bucket(limits.FRAMES_PER_MINUTE, limits.FRAMES_BURST, time.monotonic())
        try:
            async for message in socket:
                now = time.monotonic()
                if not frames.take(now):
                    line.drop(POLICY, "too many messages")
                elif message.type is WSMsgType.TEXT:
                    event = self.switchboard.text(client, message.data, now)
                    _EVENTS.debug("control", what=event, address=log.masked(group))
                elif message.type is WSMsgType.BINARY:
                    self.switchboard.binary(client, message.data, now)
        finally:
            deadline.cancel()
            self.switchboard.left(client, time.monotonic())
            self._lines.discard(line)
            if not line.is_closing:
                writer.cancel()
            await asyncio.wait({writer}, timeout=2 * limits.DRAIN_SECONDS)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)


def _drop_silent(client: Client) -> None:
    if client.role is None:
        client.line.drop(TRY_LATER, "silent")
