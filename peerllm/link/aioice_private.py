"""The one place that touches aioice's private attributes: gathering in steps, a short way for data, a quick close.

aioice publishes its candidates when the slowest server has answered or timed out, asks one STUN server on IPv4 and one
TURN server, tries to parse each datagram as STUN before it takes it for data, and waits a minute to delete an
allocation on a relay that is gone. `IceConnection` changes that and nothing else: checks, pairing and nomination are
aioice's. `tests/link/test_private_attributes.py` fails when the library changes under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import aioice
import ifaddr
import structlog
from aioice import stun, turn
from aioice.candidate import candidate_foundation, candidate_priority
from aioice.ice import StunProtocol

from peerllm.link.config import TurnServer
from peerllm.link.delay import DelayedTransport, DelayLine
from peerllm.link.signaling import Candidate

SUPPORTED = "0.13."
_VERSION = importlib.metadata.version("aioice")
if not _VERSION.startswith(SUPPORTED):
    raise ImportError(
        f"peerllm.link knows the insides of aioice {SUPPORTED}x, and {_VERSION} is installed; "
        f"install aioice=={SUPPORTED}* or a release of peerllm that knows {_VERSION}"
    )

_SOCKET_BUFFER_BYTES = 1 << 20
_GATHER_SECONDS = 5.0
_RELAY_DELETE_SECONDS = 1.0

log = structlog.get_logger(__name__)


def local_addresses() -> list[str]:
    """This machine's addresses that may be host candidates: no loopback, no link-local."""
    found = []
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips:
            text = each.ip if isinstance(each.ip, str) else each.ip[0]
            ip = ipaddress.ip_address(text)
            if not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified):
                found.append(text)
    return found


class Mapping(NamedTuple):
    """(address, port) of a socket of ours, of a STUN server, and of the socket as that server sees it."""

    local: tuple[str, int]
    server: tuple[str, int]
    seen: tuple[str, int]


class IceProtocol(StunProtocol):  # type: ignore[misc]
    """One socket or one allocation on a relay."""

    def __init__(self, receiver: IceConnection) -> None:
        super().__init__(receiver)
        self._connection = receiver

    @property
    def is_relay(self) -> bool:
        return bool(self.local_candidate.type == "relay")

    def connection_made(self, transport: Any) -> None:
        line = self._connection.delay_line
        super().connection_made(transport if line is None else DelayedTransport(transport, line))

    def datagram_received(self, data: bytes | str, addr: tuple[Any, ...]) -> None:
        # RFC 7983: a first byte of 20 to 63 is DTLS. aioice would raise and catch a ValueError for each of them.
        if data and 20 <= data[0] <= 63:  # type: ignore[operator]
            self._connection.data_received(data, 1)  # type: ignore[arg-type]
            return
        try:
            super().datagram_received(data, addr)
        except (ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            # A datagram of anybody's that aioice trips over must not end the connection's task.
            log.debug("ice.datagram_refused", error=type(error).__name__)


class IceConnection(aioice.Connection):  # type: ignore[misc]
    """aioice's connection with candidates that are told as they are found.

    Args:
        controlling: whether this side nominates.
        addresses: host addresses to bind.
        on_candidate: called with each aioice Candidate after `open_sockets`, as STUN and TURN servers answer.
        delay_seconds: every datagram leaves so much later.
    """

    def __init__(
        self,
        *,
        controlling: bool,
        addresses: Iterable[str],
        on_candidate: Callable[[Any], None],
        delay_seconds: float = 0.0,
    ) -> None:
        super().__init__(ice_controlling=controlling)
        self._addresses = list(addresses)
        self._on_candidate = on_candidate
        self._host_protocols: list[IceProtocol] = []
        self.mappings: list[Mapping] = []
        """What STUN servers saw."""
        self.on_datagram: Callable[[bytes], None] | None = None
        """Takes every datagram of data as it comes, without a queue and a task switch; None: aioice's queue."""
        self.delay_line = DelayLine(delay_seconds) if delay_seconds > 0 else None

    async def open_sockets(self) -> list[Any]:
        """Binds the host addresses; returns their candidates. Takes no time worth mentioning."""
        loop = asyncio.get_running_loop()
        for address in self._addresses:
            binding = loop.create_task(
                loop.create_datagram_endpoint(lambda: IceProtocol(self), local_addr=(address, 0))
            )
            try:
                transport, protocol = await asyncio.shield(binding)
            except asyncio.CancelledError:
                # Cancelled inside, uvloop would keep a socket that nobody holds, and wait for it when it is closed.
                (await binding)[0].close()
                raise
            except OSError as error:
                log.debug("ice.cannot_bind", error=error.strerror)
                continue
            sock = transport.get_extra_info("socket")
            if sock is not None:
                for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
            host, port = transport.get_extra_info("sockname")[:2]
            protocol.local_candidate = aioice.Candidate(
                foundation=candidate_foundation("host", "udp", host),
                component=1,
                transport="udp",
                # Distinct preferences (RFC 8421): IPv6 is added later by the system and as good as IPv4.
                priority=candidate_priority(1, "host", 65535 - len(self._host_protocols)),
                host=host,
                port=port,
                type="host",
            )
            self._host_protocols.append(protocol)
            self._protocols.append(protocol)
            self._local_candidates.append(protocol.local_candidate)
        self._local_candidates_start = self._local_candidates_end = True
        return list(self._local_candidates)

    async def ask_stun(self, servers: Iterable[tuple[str, int]]) -> None:
        """Asks each server from each host address of its family; a candidate for each new answer."""
        questions = []
        for host, port in servers:
            for ip in await _resolve(host, port):
                version = ipaddress.ip_address(ip).version
                questions += [
                    self._ask_one(protocol, (ip, port))
                    for protocol in self._host_protocols
                    if ipaddress.ip_address(protocol.local_candidate.host).version == version
                ]
        await asyncio.gather(*questions)

    async def _ask_one(self, protocol: IceProtocol, server: tuple[str, int]) -> None:
        request = stun.Message(message_method=stun.Method.BINDING, message_class=stun.Class.REQUEST)
        try:
            async with asyncio.timeout(_GATHER_SECONDS):
                response, _ = await protocol.request(request, server)
            host, port = response.attributes["XOR-MAPPED-ADDRESS"]
        except (TimeoutError, stun.TransactionError, KeyError, OSError):
            log.debug("ice.stun_silent")
            return
        base = protocol.local_candidate
        self.mappings.append(Mapping((base.host, base.port), server, (host, port)))
        if any((known.host, known.port) == (host, port) for known in self._local_candidates):
            return
        self._publish(
            aioice.Candidate(
                foundation=candidate_foundation("srflx", "udp", base.host),
                component=1,
                transport="udp",
                priority=candidate_priority(1, "srflx"),
                host=host,
                port=port,
                type="srflx",
                related_address=base.host,
                related_port=base.port,
            )
        )

    async def ask_relay(self, server: TurnServer) -> bool:
        """An allocation on one relay; True when it gave a candidate."""
        tls: ssl.SSLContext | None = ssl.create_default_context() if server.transport == "tls" else None
        try:
            async with asyncio.timeout(_GATHER_SECONDS):
                transport, protocol = await turn.create_turn_endpoint(
                    lambda: IceProtocol(self),
                    server_addr=(server.host, server.port),
                    username=server.username,
                    password=server.credential,
                    ssl=tls,
                    transport="udp" if server.transport == "udp" else "tcp",
                )
        except (TimeoutError, stun.TransactionError, ConnectionError, OSError) as error:
            log.info("ice.relay_refused", transport=server.transport, error=type(error).__name__)
            return False
        host, port = transport.get_extra_info("sockname")[:2]
        protocol.local_candidate = aioice.Candidate(
            foundation=candidate_foundation("relay", "udp", host),
            component=1,
            transport="udp",
            priority=candidate_priority(1, "relay"),
            host=host,
            port=port,
            type="relay",
        )
        self._protocols.append(protocol)
        # The remote candidates that came before it are paired with it now.
        for remote in self._remote_candidates:
            self._pair_remote_candidate(remote)
        self.sort_check_list()
        self._publish(protocol.local_candidate)
        return True

    @property
    def has_relay(self) -> bool:
        return any(protocol.is_relay for protocol in self._protocols)

    @property
    def has_stun_answer(self) -> bool:
        return bool(self.mappings)

    @property
    def is_nat_symmetric(self) -> bool:
        """Two STUN servers saw the same socket at different ports; a path has to begin from this side."""
        ports: dict[tuple[str, int], set[int]] = {}
        for each in self.mappings:
            ports.setdefault(each.local, set()).add(each.seen[1])
        return any(len(each) > 1 for each in ports.values())

    def _publish(self, candidate: Any) -> None:
        if not self._closing:
            self._local_candidates.append(candidate)
            self._on_candidate(candidate)

    def data_received(self, data: bytes, component: int) -> None:
        if self.on_datagram is not None:
            self.on_datagram(data)
        else:
            super().data_received(data, component)

    def send_now(self, data: bytes) -> bool:
        """Sends on the nominated pair without a coroutine; False when there is none."""
        pair = self._nominated.get(1)
        if pair is None:
            return False
        pair.protocol.transport.sendto(data, pair.remote_addr)
        return True

    @property
    def selected_kinds(self) -> tuple[str, str, str] | None:
        """(local kind, remote kind, remote address) of the nominated pair."""
        pair = self._nominated.get(1)
        if pair is None:
            return None
        return pair.local_candidate.type, pair.remote_candidate.type, pair.remote_addr[0]

    async def query_consent(self) -> None:
        """Nothing: the link's own pings notice a dead path sooner, and end what is sent on it (RFC 7675's purpose).

        aioice's checks wait half a second for an answer, and so end every connection whose round trip is longer.
        """

    async def close(self) -> None:
        """At most a second longer than it takes: an allocation on a silent relay is left to expire."""
        if self.delay_line is not None:
            self.delay_line.flush()
        relays = [p.transport for p in self._protocols if p.is_relay]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_RELAY_DELETE_SECONDS, _give_up_deleting, relays)
        try:
            await super().close()
        finally:
            timer.cancel()
        if self.delay_line is not None:
            self.delay_line.flush()


def _give_up_deleting(relays: list[Any]) -> None:
    for transport in relays:
        task = getattr(transport, "_TurnTransport__close_task", None)
        if task is not None:
            task.cancel()


def candidate_of(candidate: Any) -> Candidate:
    """What the other side is told of an aioice candidate."""
    return Candidate(
        address=candidate.host,
        port=candidate.port,
        kind=candidate.type,
        priority=candidate.priority,
        foundation=candidate.foundation,
    )


async def _resolve(host: str, port: int) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        log.info("ice.stun_name_unknown")
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
