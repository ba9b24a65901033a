"""Two seated peers whose TURN credentials end soon, on one host: `python -m tests.lab.renewing SIGNALING FOLDER`.

Prints what the relay said of the first credentials and of those that came later, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from aioice import stun

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.meeting import make_link
from peerllm.link import Link, LinkState
from peerllm.link.aioice_private import IceConnection
from peerllm.link.config import TurnServer
from peerllm.rooms import RoomClient, SeatedPeer
from peerllm.rooms.servers import TurnServers

SECONDS = 30.0


async def run(url: str, folder: Path) -> dict[str, Any]:
    peers = await meet(url, folder)
    links = [relayed_link(url, folder, peer) for peer in peers]
    try:
        await asyncio.gather(*(link.start() for link in links))
        first = peers[0].ice_servers.turn
        if first is None:
            raise SystemExit("no relay was offered")
        told = {"path": links[0].stats().path, "granted_at_first": await is_granted(first)}
        while peers[0].ice_servers.turn == first:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        told["renewed_before_the_end"] = time.monotonic() < first.ends_at
        await asyncio.sleep(first.ends_at - time.monotonic() + 1.5)  # the user name counts in whole seconds
        told["granted_after_the_end"] = await is_granted(first)
        told["granted_anew"] = await is_granted(peers[0].ice_servers.turn or first)
        told["carries_after_the_end"] = await passes(*links)
        told["keeps_its_allocation"] = all([await is_refreshed(link) for link in links])
        epoch = links[1].epoch
        for link in links:
            link._sign_seen("test")  # as after a change of address
        links[0]._current.transport._lost()  # type: ignore[union-attr]
        while not all(link.epoch > epoch and link.state is LinkState.UP for link in links):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        told["path_anew"] = links[0].stats().path
        told["carries_anew"] = await passes(*links)
        return told
    finally:
        await asyncio.gather(*(link.close() for link in links))
        await asyncio.gather(*(peer.close() for peer in peers))


async def meet(url: str, folder: Path) -> list[SeatedPeer]:
    room = await RoomClient(url, folder / "one", insecure=True).open()
    opener, joiner = await asyncio.gather(
        room.admit(), RoomClient(url, folder / "two", insecure=True).join(str(room.code))
    )
    await room.close()
    return [opener, joiner]


def relayed_link(url: str, folder: Path, peer: SeatedPeer) -> Link:
    config = DaemonConfig(signaling=url, state_dir=folder, socket=folder / "socket", is_insecure=True)
    link = make_link(config, peer, hello=lambda: b"", on_hello=lambda body: None)
    offered = link._make_config
    link._make_config = lambda: replace(offered(), relay_only=True)
    return link


async def passes(one: Link, other: Link) -> bool:
    async with asyncio.timeout(SECONDS):
        await one.send(b"are you there?")
        return await other.receive() == b"are you there?"


async def is_refreshed(link: Link) -> bool:
    """Whether the relay prolongs the allocation of the present connection, as aioice asks it to every eight minutes."""
    connection = link._current.transport._connection  # type: ignore[union-attr]
    (relayed,) = (each.transport for each in connection._protocols if each.is_relay)
    request = stun.Message(message_method=stun.Method.REFRESH, message_class=stun.Class.REQUEST)
    request.attributes["LIFETIME"] = 600
    try:
        await relayed._TurnTransport__inner_protocol.request_with_retry(request)
    except stun.TransactionError:
        return False
    return True


async def is_granted(servers: TurnServers) -> bool:
    """Whether the relay gives an allocation for these credentials."""
    host, port, transport = servers.endpoints()[0]
    connection = IceConnection(controlling=True, addresses=[], on_candidate=lambda candidate: None)
    try:
        return await connection.ask_relay(TurnServer(host, port, servers.username, servers.credential, transport))
    finally:
        await connection.close()


if __name__ == "__main__":

    async def main() -> None:
        async with asyncio.timeout(2 * SECONDS):
            print(json.dumps(await run(sys.argv[1], Path(sys.argv[2]))))

    uvloop.run(main())
