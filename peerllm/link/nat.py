"""Which kind of NAT is before this machine, from what two STUN ports of one server saw of one socket.

Two ports at one address cannot tell a NAT whose mapping depends on the address alone from one that keeps it: such NATs
are rare, and a pair that fails behind one is told so by the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peerllm.link.aioice_private import IceConnection, Mapping, candidate_of, local_addresses
from peerllm.link.config import TurnServer
from peerllm.link.signaling import Candidate

PROBE_SECONDS = 3.0
"""STUN asks again after 0.5, 1 and 2 s: three answers would have to be lost."""
_INSIDE = tuple(ipaddress.ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))


class NatKind(enum.Enum):
    NONE = "none"
    """The socket's own address is what the world sees."""
    PORT_PRESERVING = "port-preserving"
    """Another address, the same port to whomever it speaks."""
    ENDPOINT_INDEPENDENT = "endpoint-independent"
    """Another port too, and the same one to whomever it speaks (RFC 4787 section 4.1)."""
    SYMMETRIC = "symmetric"
    """A port for each destination: nobody can be told where to send."""
    UDP_BLOCKED = "udp-blocked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Relay:
    server: TurnServer
    answers: bool
    seconds: float
    """To an allocation, or to the refusal."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What was found of the way out of this machine."""

    kind: NatKind
    mappings: tuple[Mapping, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    relays: tuple[Relay, ...] = ()


def classify(mappings: Iterable[Mapping], *, asked: int) -> NatKind:
    """The kind of the NAT before IPv4, or before IPv6 where IPv4 heard nothing.

    Args:
        mappings: the answers of STUN servers.
        asked: how many (address, port) of servers were asked.
    """
    answered = list(mappings)
    if not asked:
        return NatKind.UNKNOWN
    if not answered:
        return NatKind.UDP_BLOCKED
    # What is at the border of this network was not passed on the way to a server within.
    passed = [each for each in answered if not (is_inside(each.seen[0]) or _is_here(each))]
    if not passed:
        return NatKind.UNKNOWN
    told = [each for each in passed if ipaddress.ip_address(each.local[0]).version == 4] or passed
    # A machine with several ways out has each kind; ICE finds the easiest.
    kinds = [_kind_of(local, told) for local in dict.fromkeys(each.local for each in told)]
    return min(kinds, key=list(NatKind).index)


def _kind_of(local: tuple[str, int], mappings: Sequence[Mapping]) -> NatKind:
    seen = {each.seen for each in mappings if each.local == local}
    if seen == {local}:
        return NatKind.NONE
    if len(seen) > 1:
        return NatKind.SYMMETRIC
    if sum(each.local == local for each in mappings) < 2:
        return NatKind.UNKNOWN  # one answer says nothing of the next
    return NatKind.PORT_PRESERVING if next(iter(seen))[1] == local[1] else NatKind.ENDPOINT_INDEPENDENT


def _is_here(mapping: Mapping) -> bool:
    """Whether the server is on this machine."""
    return ipaddress.ip_address(mapping.server[0]).is_loopback or mapping.server[0] == mapping.local[0]


def is_inside(address: str) -> bool:
    """Whether the address is one of a private network's (RFC 1918, RFC 4193)."""
    ip = ipaddress.ip_address(address)
    return any(ip in network for network in _INSIDE if network.version == ip.version)


async def look_outside(
    stun: Sequence[tuple[str, int]], relays: Iterable[TurnServer] = (), *, seconds: float = PROBE_SECONDS
) -> Outside:
    """Asks all servers at once, from every address of this machine. Takes `seconds` at most, and a second to close."""
    found: list[Candidate] = []
    connection = IceConnection(
        controlling=True,
        addresses=local_addresses(),
        on_candidate=lambda each: found.append(candidate_of(each)),
    )
    try:
        found += [candidate_of(each) for each in await connection.open_sockets()]
        asking = asyncio.gather(*(_ask(connection, each, seconds) for each in relays))
        await _within(seconds, connection.ask_stun(stun))
        answers = await asking
        mappings = tuple(connection.mappings)
    finally:
        await connection.close()
    return Outside(
        kind=classify(mappings, asked=len(stun)),
        mappings=mappings,
        candidates=tuple(found),
        relays=tuple(answers),
    )


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def _ask(connection: IceConnection, server: TurnServer, seconds: float) -> Relay:
    begun = time.monotonic()
    answers = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            answers = await connection.ask_relay(server)
    return Relay(server, answers, time.monotonic() - begun)
