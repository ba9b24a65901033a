"""Peers with state directories, a server to meet at, and a relay that meddles with what passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web
from peerllm_signaling.server import PATH, ServerConfig, SignalingServer

from peerllm.rooms import Room, RoomClient, SeatedPeer
from peerllm.rooms.attempt import Attempt

SECONDS = 20
"""The longest wait of any test but those that say so; nothing that passes comes near it."""

Data = str | bytes


@dataclass
class Passing:
    """A message on its way through the meddler."""

    connection: int
    is_from_client: bool
    data: Data

    @property
    def op(self) -> str | None:
        """Of a control message."""
        return json.loads(self.data)["op"] if isinstance(self.data, str) else None

    def has_kind(self, kind: int, *, claim: bool = False) -> bool:
        """Whether it is what one peer says to the other, of that kind; `claim`: behind a claim's number."""
        return isinstance(self.data, bytes) and self.data[4 if claim else 0 :][:1] == bytes([kind])


@dataclass
class Meddler:
    """A signaling server as the peers see it: passes everything on to a real one, through `meddle`."""

    target: str
    meddle: Callable[[Passing], Iterable[Data]] = lambda passing: [passing.data]
    """What to pass on in its place: nothing, something else, several. `back` sends to where it came from."""
    url: str = ""
    seen: list[Passing] = field(default_factory=list)
    sockets: dict[int, web.WebSocketResponse] = field(default_factory=dict)
    servers: dict[int, aiohttp.ClientWebSocketResponse] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        number = len(self.sockets)
        here = web.WebSocketResponse(autoping=True)
        await here.prepare(request)
        self.sockets[number] = here
        async with aiohttp.ClientSession() as session, session.ws_connect(self.target + PATH) as there:
            self.servers[number] = there
            up = asyncio.create_task(self._pass_on(number, here, there, is_from_client=True))
            down = asyncio.create_task(self._pass_on(number, there, here, is_from_client=False))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            up.cancel(), down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            await here.close()
        return here

    async def _pass_on(self, number: int, source: Any, sink: Any, *, is_from_client: bool) -> None:
        async for message in source:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                continue
            passing = Passing(number, is_from_client, message.data)
            self.seen.append(passing)
            for data in self.meddle(passing):
                await self._send(sink, data)

    async def _send(self, sink: Any, data: Data) -> None:
        with contextlib.suppress(ConnectionError):
            await (sink.send_str(data) if isinstance(data, str) else sink.send_bytes(data))

    def say_back(self, passing: Passing, data: Data) -> None:
        """To the client that the message came from or goes to."""
        self._spawn(self._send(self.sockets[passing.connection], data))

    def say_on(self, passing: Passing, data: Data) -> None:
        """To the real server, as if the client had said it."""
        self._spawn(self._send(self.servers[passing.connection], data))

    def close_soon(self, passing: Passing) -> None:
        """The client's connection, without a word."""
        self._spawn(_ended(self.sockets[passing.connection].close()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def bodies(self, kind: int, *, is_from_client: bool = True) -> list[bytes]:
        return [
            passing.data
            for passing in self.seen
            if passing.has_kind(kind) and passing.is_from_client is is_from_client and isinstance(passing.data, bytes)
        ]


async def _ended(closing: Coroutine[Any, Any, bool]) -> None:
    await closing


@asynccontextmanager
async def meddler(target: str, meddle: Callable[[Passing], Iterable[Data]] | None = None) -> AsyncIterator[Meddler]:
    made = Meddler(target)
    if meddle is not None:
        made.meddle = meddle
    app = web.Application()
    app.router.add_get(PATH, made.serve)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"ws://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        for socket in made.sockets.values():
            await socket.close()
        await runner.cleanup()


@dataclass
class Wire:
    """A TCP path to a server that can go dead without a word, as when a cable is pulled."""

    target_port: int
    is_cut: bool = False
    url: str = ""
    _copies: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.is_cut:
            return
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers.append(other_writer)
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            self._copies.add(asyncio.create_task(self._copy(source, sink)))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not self.is_cut:
                    sink.write(data)
        if not self.is_cut:
            sink.close()


@asynccontextmanager
async def wire(target_port: int) -> AsyncIterator[Wire]:
    made = Wire(target_port)
    server = await asyncio.start_server(made.carry, "127.0.0.1", 0)
    made.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for copy in made._copies:
            copy.cancel()
        for writer in made._writers:
            writer.transport.abort()
        await asyncio.gather(*made._copies, return_exceptions=True)
        await server.wait_closed()


@asynccontextmanager
async def signaling(port: int = 0) -> AsyncIterator[SignalingServer]:
    server = SignalingServer(ServerConfig("127.0.0.1", port))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass
class House:
    """Two peers that have not met yet, and what has to be closed in the end."""

    url: str
    folder: Path
    opened: list[Room | SeatedPeer] = field(default_factory=list)

    def client(self, name: str, url: str | None = None) -> RoomClient:
        return RoomClient(url or self.url, self.folder / name)

    async def open(self, client: RoomClient, **options: Any) -> Room:
        room = await client.open(**options)
        self.opened.append(room)
        return room

    def keep(self, peer: SeatedPeer) -> SeatedPeer:
        self.opened.append(peer)
        return peer

    async def pair(self, url: str | None = None, names: tuple[str, str] = ("a", "b")) -> tuple[SeatedPeer, SeatedPeer]:
        """Two that share a code. The one that begins attempts is first."""
        room = await self.open(self.client(names[0], url))
        async with asyncio.timeout(SECONDS):
            one, two = await asyncio.gather(room.admit(), self.client(names[1], url).join(str(room.code)))
        self.keep(one), self.keep(two)
        return (one, two) if one.is_controlling else (two, one)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self.opened))


async def connect(begins: SeatedPeer, accepts: SeatedPeer, epoch: int = 1) -> tuple[Attempt, Attempt]:
    """Both ends of a new attempt."""
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(begins.begin(epoch), accepts.accept())


async def until(condition: Callable[[], bool]) -> None:
    """For what no event tells: the inside of a server or of a peer."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
