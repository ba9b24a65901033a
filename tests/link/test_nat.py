"""Which NAT is it? From what STUN servers saw; and from real sockets on this machine."""

from __future__ import annotations

import asyncio
import time

import pytest
from peerllm_signaling.server import ServerConfig, SignalingServer

from peerllm.link import TurnServer
from peerllm.link.aioice_private import Mapping
from peerllm.link.nat import NatKind, classify, look_outside

SERVERS = (("198.51.100.1", 8080), ("198.51.100.1", 8081))
HOME = ("192.168.1.5", 4000)


def mappings(*seen: tuple[str, int], local: tuple[str, int] = HOME) -> list[Mapping]:
    """What the servers saw of `local`, one after the other."""
    return [Mapping(local, server, each) for server, each in zip(SERVERS, seen, strict=False)]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (mappings(("203.0.113.9", 4000), ("203.0.113.9", 4000), local=("203.0.113.9", 4000)), NatKind.NONE),
        (mappings(("203.0.113.9", 4000), ("203.0.113.9", 4000)), NatKind.PORT_PRESERVING),
        (mappings(("203.0.113.9", 61001), ("203.0.113.9", 61001)), NatKind.ENDPOINT_INDEPENDENT),
        (mappings(("203.0.113.9", 61001), ("203.0.113.9", 61002)), NatKind.SYMMETRIC),
        (mappings(("203.0.113.9", 4000), ("203.0.113.10", 4000)), NatKind.SYMMETRIC),
        ([], NatKind.UDP_BLOCKED),
        (mappings(("203.0.113.9", 4000)), NatKind.UNKNOWN),
        (mappings(("192.168.1.5", 4000), ("192.168.1.5", 4000)), NatKind.UNKNOWN),
        (mappings(("10.0.0.7", 61001), ("10.0.0.7", 61002)), NatKind.UNKNOWN),
    ],
)
def test_the_kind_follows_from_what_the_servers_saw(found: list[Mapping], kind: NatKind) -> None:
    assert classify(found, asked=2) is kind


def test_where_nobody_was_asked_nothing_is_known() -> None:
    assert classify([], asked=0) is NatKind.UNKNOWN


def test_the_easiest_way_out_of_several_counts() -> None:
    tunnel = mappings(("203.0.113.9", 61001), ("203.0.113.9", 61002), local=("10.8.0.2", 4001))
    assert classify(tunnel + mappings(("203.0.113.9", 4000), ("203.0.113.9", 4000)), asked=2) is NatKind.PORT_PRESERVING


def test_ipv6_without_a_nat_does_not_hide_the_nat_before_ipv4() -> None:
    own = ("2001:db8::5", 4002)
    six = [Mapping(own, ("2001:db8::1", port), own) for port in (8080, 8081)]
    assert classify(six, asked=2) is NatKind.NONE
    assert classify(six + mappings(("203.0.113.9", 61001), ("203.0.113.9", 61002)), asked=2) is NatKind.SYMMETRIC


@pytest.mark.parametrize("server", ["127.0.0.1", "203.0.113.9"])
def test_a_server_on_this_machine_tells_nothing_of_the_way_out(server: str) -> None:
    own = ("203.0.113.9", 4000)
    assert classify([Mapping(own, (server, port), own) for port in (1, 2)], asked=2) is NatKind.UNKNOWN


async def test_real_servers_are_asked_from_every_address() -> None:
    server = SignalingServer(ServerConfig("127.0.0.1", 0))
    await server.start()
    try:
        found = await look_outside([("127.0.0.1", port) for port in server.stun_ports])
    finally:
        await server.stop()
    assert found.kind is NatKind.UNKNOWN
    assert {each.server[1] for each in found.mappings} <= set(server.stun_ports)
    assert {each.kind for each in found.candidates} <= {"host", "srflx"}


async def test_servers_that_are_silent_cost_the_time_that_was_given_and_no_more() -> None:
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
    )
    silent = transport.get_extra_info("sockname")[:2]
    begun = time.monotonic()
    try:
        found = await look_outside([silent], [TurnServer(*silent, "user", "credential")], seconds=0.3)
    finally:
        transport.close()
    assert time.monotonic() - begun < 5
    assert found.kind is NatKind.UDP_BLOCKED
    assert [each.answers for each in found.relays] == [False]
