"""Meeting the other peer: a room opened, joined or resumed, and the link that goes through what the room offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.events import Connected, PeerSeated, RoomOpened, Tell, Trouble, WrongGuess
from peerllm.link import Link, LinkConfig, LinkState, TurnServer
from peerllm.rooms import Room, RoomClient, SeatedPeer


async def meet(config: DaemonConfig, tell: Tell) -> tuple[SeatedPeer, Room | None]:
    """Waits for the other peer as long as it takes. The opener gets its room too: it answers further joiners until it
    is closed.

    Raises:
        RoomError, ProtocolError: in words: a wrong code, a server that cannot be reached, another release.
    """
    client = RoomClient(config.signaling, config.state_dir, insecure=config.is_insecure)
    if config.resume is not None:
        return await client.resume(config.resume or None), None
    room: Room | None = None
    if config.room_code is not None:
        peer = await client.join(config.room_code)
    else:
        room = await client.open(on_guess=lambda wrong, left: tell(WrongGuess(wrong, left)))
        tell(RoomOpened(str(room.code)))
        try:
            peer = await room.admit()
        except BaseException:
            await room.close()
            raise
    tell(PeerSeated(peer.room_name))
    return peer, room


def make_link(
    config: DaemonConfig, peer: SeatedPeer, hello: Callable[[], bytes], on_hello: Callable[[bytes], None]
) -> Link:
    """A link to that peer, not started. Each attempt takes the STUN servers and relays that signaling offers then."""
    base = LinkConfig(loopback=config.is_loopback, added_rtt_ms=config.added_rtt_ms, kept_seconds=config.kept_seconds)

    def with_servers() -> LinkConfig:
        if config.is_loopback:
            return base  # nothing leaves this machine
        turn = peer.ice_servers.turn
        relays = (
            ()
            if turn is None
            else tuple(
                TurnServer(host, port, turn.username, turn.credential, transport)
                for host, port, transport in turn.endpoints()
            )
        )
        return replace(base, stun=peer.ice_servers.stun, turn=relays)

    return Link(peer, with_servers, hello=hello, on_hello=on_hello)


def tell_states(link: Link, tell: Tell) -> None:
    """Says from now on when the link, which is UP, becomes suspect, and when it is up again."""

    def changed(state: LinkState) -> None:
        if state is LinkState.SUSPECT:
            tell(Trouble("The other peer is silent, or the path to it changed. Looking for a new connection …"))
        elif state is LinkState.UP:
            stats = link.stats()
            tell(Connected(stats.path, stats.rtt_ms))

    link.on_state = changed
