"""Whose word counts about where a connection comes from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises ValueError for what is not an address or a network."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def client_address(peer: str, forwarded: str | None, proxies: tuple[Network, ...]) -> str:
    """The client's address: the socket's, unless that is a configured proxy; then the last address in
    X-Forwarded-For that is not one. What a client itself wrote into the header stands further left and is not read.
    """
    if not _is_proxy(peer, proxies) or not forwarded:
        return peer
    address = peer
    for entry in reversed(forwarded.split(",")):
        address = entry.strip()
        if not _is_proxy(address, proxies):
            return address
    return address


def _is_proxy(address: str, proxies: tuple[Network, ...]) -> bool:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip.version == network.version and ip in network for network in proxies)
