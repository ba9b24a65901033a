"""Reaching the signaling server again over a network that swallows what it is given, until it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from peerllm_signaling.server import SignalingServer

from peerllm.protocol import limits
from peerllm.protocol.errors import SignalingUnreachable
from peerllm.rooms import server as rooms_server
from tests.rooms.house import SECONDS


class Doorway:
    """A TCP path to a server: what comes while it `is_silent` is taken and never answered, also later."""

    def __init__(self, port: int) -> None:
        self.is_silent = True
        self.swallowed = 0
        self.writers: list[asyncio.StreamWriter] = []
        self._port = port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        if self.is_silent:
            self.swallowed += 1
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self.writers.append(back)
        await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
    sink.close()


@asynccontextmanager
async def doorway(port: int) -> AsyncIterator[tuple[Doorway, str]]:
    made = Doorway(port)
    listening = await asyncio.start_server(made.carry, "127.0.0.1", 0)
    try:
        yield made, f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for writer in made.writers:
            writer.transport.abort()
        await listening.wait_closed()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[aiohttp.ClientSession]:
    """Every session that is made: all have to be closed in the end."""
    made: list[aiohttp.ClientSession] = []

    def remembered(**options: Any) -> aiohttp.ClientSession:
        made.append(session(**options))
        return made[-1]

    session = aiohttp.ClientSession
    monkeypatch.setattr(rooms_server.aiohttp, "ClientSession", remembered)
    return made


async def test_a_network_that_returns_is_noticed_while_earlier_tries_still_wait(
    server: SignalingServer, sessions: list[aiohttp.ClientSession]
) -> None:
    async with doorway(server.port) as (door, url):
        trying = asyncio.create_task(rooms_server.reconnect(url, stagger=0.05))
        async with asyncio.timeout(SECONDS):
            while door.swallowed < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            door.is_silent = False
            socket = await trying
        await socket.say("unheard of")
        assert (await socket.receive()) != b""
        await socket.close()
    assert len(sessions) > 3
    assert all(session.closed for session in sessions)


async def test_a_server_that_refuses_ends_it_at_once(sessions: list[aiohttp.ClientSession]) -> None:
    begun = time.monotonic()
    with pytest.raises(SignalingUnreachable, match="cannot be reached"):
        await rooms_server.reconnect("ws://127.0.0.1:9", stagger=1.0)
    assert time.monotonic() - begun < limits.SIGNALING_CONNECT_SECONDS
    assert all(session.closed for session in sessions)


async def test_silence_ends_it_in_time(
    server: SignalingServer, sessions: list[aiohttp.ClientSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNALING_CONNECT_SECONDS", 0.5)
    async with doorway(server.port) as (_, url):
        with pytest.raises(SignalingUnreachable, match="does not answer"):
            async with asyncio.timeout(SECONDS):
                await rooms_server.reconnect(url, stagger=0.1)
    assert len(sessions) > 1
    assert all(session.closed for session in sessions)


async def test_giving_up_leaves_nothing_behind(server: SignalingServer, sessions: list[aiohttp.ClientSession]) -> None:
    async with doorway(server.port) as (door, url):
        trying = asyncio.create_task(rooms_server.reconnect(url, stagger=0.02))
        async with asyncio.timeout(SECONDS):
            while door.swallowed < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        assert trying.cancelled()
    assert all(session.closed for session in sessions)


async def test_a_socket_whose_address_is_still_this_machines_is_not_given_up(server: SignalingServer) -> None:
    socket = await rooms_server.connect(server.address)
    assert not socket.has_lost_its_address
    reading = asyncio.create_task(socket.receive())
    assert await socket.is_alive(SECONDS)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await socket.close()


async def test_a_socket_whose_address_is_gone_is_given_up_without_a_wait(
    server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = await rooms_server.connect(server.address)
    # An address of documentation: no machine has it.
    monkeypatch.setattr(socket._socket, "get_extra_info", lambda name, default=None: ("192.0.2.1", 50000))
    begun = time.monotonic()
    assert not await socket.is_alive(SECONDS)
    assert time.monotonic() - begun < SECONDS / 2
    await socket.close()
