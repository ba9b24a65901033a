"""Room codes, SPAKE2, sealed signaling: two peers that share a code, and nobody else, learn each other's keys.

    codes, words   what people say to each other          pake      SPAKE2 and key confirmation, sans-I/O
    keys           the state directory                    noise     Noise KK, sans-I/O
    wire           formats of what peers say              attempt   one attempt: fresh keys, sealed messages
    server         a WebSocket to the signaling server    rendezvous  one that is kept where two peers meet
    servers        STUN and TURN that it offers           seated    a peer met again and again
    room           the opener's end                       client    what the daemon calls
    probe          is the server there, what does it offer: asked without a room

`RoomClient` is imported when it is asked for, so that the shell's completion of codes needs neither aiohttp nor keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerllm.rooms.client import RoomClient
    from peerllm.rooms.room import Room
    from peerllm.rooms.seated import SeatedPeer

__all__ = ["Room", "RoomClient", "SeatedPeer"]


def __getattr__(name: str) -> Any:
    if name == "RoomClient":
        from peerllm.rooms.client import RoomClient

        return RoomClient
    if name == "Room":
        from peerllm.rooms.room import Room

        return Room
    if name == "SeatedPeer":
        from peerllm.rooms.seated import SeatedPeer

        return SeatedPeer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
