"""The signaling server, asked by one machine alone."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from peerllm_signaling.server import ServerConfig, SignalingServer
from peerllm_signaling.turn import TurnServers

from peerllm.protocol.errors import SignalingUnreachable
from peerllm.rooms.probe import reach


async def test_a_server_says_what_it_offers_and_no_room_is_opened(server: SignalingServer) -> None:
    found = await reach(server.address)
    assert {port for _, port in found.ice_servers.stun} == set(server.stun_ports)
    assert found.ice_servers.turn is None
    assert 0 < found.round_trip_seconds < 5
    assert 0 < found.connect_seconds < 5
    assert len(server.switchboard.rooms) == 0


async def test_relays_are_offered_to_one_machine_as_to_a_pair_however_many_ask(nothing_is_left_behind: None) -> None:
    server = SignalingServer(ServerConfig("127.0.0.1", 0, turn=TurnServers(("turn:127.0.0.1:3478",), b"secret")))
    await server.start()
    try:
        found = await asyncio.gather(*(reach(server.address) for _ in range(8)))
    finally:
        await server.stop()
    offered = [each.ice_servers.turn for each in found]
    assert all(turn is not None and turn.endpoints() == [("127.0.0.1", 3478, "udp")] for turn in offered)
    assert len({turn.username for turn in offered if turn is not None}) == 8  # none met another


async def test_nobody_there_is_said_in_words(nothing_is_left_behind: None) -> None:
    with pytest.raises(SignalingUnreachable, match="cannot be reached"):
        await reach("ws://127.0.0.1:1")


async def test_a_server_that_takes_connections_and_is_silent_is_given_up(nothing_is_left_behind: None) -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    begun = time.monotonic()
    try:
        with pytest.raises(SignalingUnreachable, match="does not answer"):
            await reach(f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}", seconds=0.3)
        assert time.monotonic() - begun < 5
    finally:
        for writer in held:
            writer.close()
        silent.close()


async def test_a_server_that_talks_and_says_nothing_of_use_is_not_called_silent(nothing_is_left_behind: None) -> None:
    async def babble(asked: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(asked)
        await socket.send_str("hello")
        await socket.send_bytes(b"\x00\xff")
        async for _ in socket:
            await socket.send_str('{"op": 5}')
        return socket

    application = web.Application()
    application.router.add_get("/v1", babble)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(SignalingUnreachable, match="no answer that peerllm understands"):
            await reach(f"ws://127.0.0.1:{runner.addresses[0][1]}", seconds=0.3)
    finally:
        await runner.cleanup()
