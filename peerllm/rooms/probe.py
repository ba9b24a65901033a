"""Is the signaling server there, how far is it, and what does it offer? Asked without a room and without a peer.

Two connections of this machine's own meet at an identifier drawn for the occasion: that passes through all that a pair
passes through, and the server offers relays to pairs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import PeerllmError, SignalingUnreachable
from peerllm.rooms import server
from peerllm.rooms.servers import IceServers

_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class Reached:
    connect_seconds: float
    """Names, TCP, TLS and the WebSocket's handshake."""
    round_trip_seconds: float
    ice_servers: IceServers


async def reach(url: str, *, insecure: bool = False, seconds: float = limits.SIGNALING_CONNECT_SECONDS) -> Reached:
    """At most twice `seconds`, and a second to close.

    Raises:
        SignalingUnreachable, RoomError: why peers cannot meet there, in words.
    """
    begun = time.monotonic()
    socket = await server.connect(url, insecure=insecure, seconds=seconds)
    connected = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            meeting_id = secrets.token_hex(_ID_BYTES)
            offered = await _meet(socket, 0, meeting_id)
            answered = time.monotonic()
            servers = IceServers().with_stun(url, offered)
            with contextlib.suppress(PeerllmError):  # a server that serves one and refuses the second serves
                servers = servers.with_turn(await _pair(url, socket, meeting_id, insecure), time.monotonic())
    except TimeoutError:
        raise SignalingUnreachable(
            f"The signaling server {url} takes connections, and gives no answer that peerllm understands."
        ) from None
    finally:
        await socket.close()
    return Reached(connected - begun, answered - connected, servers)


async def _pair(url: str, socket: server.ServerSocket, meeting_id: str, insecure: bool) -> dict[str, Any]:
    """What the server tells the two ends of a meeting."""
    other = await server.connect(url, insecure=insecure)
    try:
        await _meet(other, 1, meeting_id)
        return await _hear(socket, "present")
    finally:
        await other.close()


async def _meet(socket: server.ServerSocket, side: int, meeting_id: str) -> dict[str, Any]:
    await socket.say("meet", side=side, ids=[meeting_id])
    return await _hear(socket, "meeting")


async def _hear(socket: server.ServerSocket, op: str) -> dict[str, Any]:
    """The next control message of that name. Raises what the server says in its place."""
    while True:
        message = await socket.receive()
        if isinstance(message, dict):
            if message["op"] == op:
                return message
            if message["op"] == "error":
                raise server.error_of(message.get("code"))
