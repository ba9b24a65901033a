"""One stack of ICE, DTLS and SCTP with its data channel: the life of one attempt to connect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog
from aiortc import (
    RTCCertificate,
    RTCDataChannel,
    RTCDataChannelParameters,
    RTCDtlsFingerprint,
    RTCDtlsParameters,
    RTCIceCandidate,
    RTCIceParameters,
    RTCSctpCapabilities,
)

from peerllm.link import aiortc_private
from peerllm.link.aioice_private import IceConnection, candidate_of, local_addresses
from peerllm.link.config import LinkConfig
from peerllm.link.signaling import Candidate, Description
from peerllm.protocol import limits
from peerllm.protocol.errors import LinkError, NoPath

_SCTP_PORT = 5000
_LOOPBACK = "127.0.0.1"
_CHANNEL = RTCDataChannelParameters(label="peerllm", ordered=False, negotiated=True, id=0)
"""Negotiated: it is open as soon as SCTP is. Unordered: a lost slice holds back its own message and no other."""
_RELAY_AFTER_SECONDS = 0.5
"""A relay is asked so much later than the rest, so that a direct path has been found where there is one."""
_OTHER_RELAYS_AFTER_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Transport:
    """
    Args:
        on_candidate: a local candidate that was found after `open_sockets`.
        on_message: one message of the data channel.
        on_writable: `is_writable` has become true.
        on_closed: the other side is gone or the stack broke; called at most once, never after `close`.
    """

    def __init__(
        self,
        config: LinkConfig,
        *,
        is_controlling: bool,
        on_candidate: Callable[[Candidate], None],
        on_message: Callable[[bytes], None],
        on_writable: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._config = config
        self._on_candidate = on_candidate
        self._on_message = on_message
        self._on_closed = on_closed
        self._is_direct_only = config.direct_only
        self._is_closing = False
        self._gathering: asyncio.Task[None] | None = None
        self._remote_count = 0
        self._remote_mapped: list[str] = []
        self._max_message_bytes = limits.MAX_SLICE_BYTES
        addresses = [_LOOPBACK] if config.loopback else local_addresses()
        self._connection = IceConnection(
            controlling=is_controlling,
            addresses=[] if config.relay_only else addresses,
            on_candidate=self._candidate_found,
            delay_seconds=config.added_rtt_ms / 2000,
        )
        self._ice = aiortc_private.ice_transport(self._connection)
        certificate = RTCCertificate.generateCertificate()
        self.fingerprint = bytes.fromhex(_sha256_of(certificate.getFingerprints()).replace(":", ""))
        self._dtls = aiortc_private.DtlsTransport(self._ice, certificate)
        self._dtls.on("statechange", self._dtls_changed)
        kind = aiortc_private.SctpTransport if config.own_sctp else aiortc_private.StockSctpTransport
        self._sctp = kind(self._dtls)
        self._sctp.on_writable = on_writable
        self._sctp.on_broken = self._lost
        self._channel = RTCDataChannel(self._sctp, _CHANNEL)
        self._opened = asyncio.Event()
        self._channel.on("open", self._opened.set)
        self._channel.on("close", self._lost)
        self._channel.on("message", self._message)
        self._channel.on("bufferedamountlow", on_writable)

    async def open_sockets(self) -> Description:
        """Binds the sockets; what the other side needs to know, with the host candidates in it."""
        host = await self._connection.open_sockets()
        parameters = self._ice.iceGatherer.getLocalParameters()
        return Description(
            username=parameters.usernameFragment,
            password=parameters.password,
            fingerprint=self.fingerprint,
            sctp_port=self._sctp.port,
            max_message_bytes=type(self._sctp).getCapabilities().maxMessageSize,
            candidates=tuple(candidate_of(each) for each in host[: limits.MAX_REMOTE_CANDIDATES]),
            direct_only=self._is_direct_only,
        )

    def start_gathering(self) -> None:
        """Asks the STUN servers now and the relays a little later; results go to `on_candidate`."""
        self._gathering = asyncio.create_task(self._gather())

    async def _gather(self) -> None:
        await asyncio.gather(self._connection.ask_stun(self._config.stun), self._ask_relays())

    async def _ask_relays(self) -> None:
        """Relays over UDP first; over TCP and TLS too when none of those has answered for a while."""
        relays = self._config.turn
        if not relays:
            return
        if not self._config.relay_only:
            await asyncio.sleep(_RELAY_AFTER_SECONDS)
        if self._is_direct_only:
            return
        over_udp = [asyncio.create_task(self._connection.ask_relay(r)) for r in relays if r.transport == "udp"]
        try:
            if over_udp:
                done, _ = await asyncio.wait(over_udp, timeout=_OTHER_RELAYS_AFTER_SECONDS)
                if any(each.result() for each in done):
                    return
            await asyncio.gather(*(self._connection.ask_relay(r) for r in relays if r.transport != "udp"), *over_udp)
        finally:
            for each in over_udp:
                each.cancel()

    def stop_gathering(self) -> None:
        """A path was found: nothing more is asked."""
        if self._gathering is not None:
            self._gathering.cancel()

    def _candidate_found(self, candidate: object) -> None:
        self._on_candidate(candidate_of(candidate))

    async def add_candidates(self, candidates: tuple[Candidate, ...]) -> None:
        """Remote candidates; those beyond MAX_REMOTE_CANDIDATES, or with addresses of no use, are passed over."""
        for each in candidates:
            if self._is_closing or self._remote_count >= limits.MAX_REMOTE_CANDIDATES:
                return
            is_unwanted = self._is_direct_only and each.kind == "relay"
            if is_unwanted or not each.is_usable(loopback=self._config.loopback):
                log.debug("ice.candidate_passed_over", kind=each.kind)
                continue
            self._remote_count += 1
            if each.kind == "srflx":
                self._remote_mapped.append(each.address)
            await self._ice.addRemoteCandidate(
                RTCIceCandidate(
                    component=1,
                    foundation=each.foundation,
                    ip=each.address,
                    port=each.port,
                    priority=each.priority,
                    protocol="udp",
                    type=each.kind,
                )
            )

    async def connect(self, remote: Description) -> None:
        """ICE, DTLS and SCTP, until the data channel is open. The caller bounds the time.

        Messages of any length pass in pieces that the other side takes (RFC 8841 section 6).

        Raises:
            NoPath: no pair of candidates works.
            LinkError: the other side is not the one whose fingerprint was given, or the stack broke.
        """
        if remote.max_message_bytes:  # 0 is no limit
            self._max_message_bytes = min(self._max_message_bytes, remote.max_message_bytes)
        self._is_direct_only = self._is_direct_only or remote.direct_only
        await self.add_candidates(remote.candidates)
        await self._ice.start(RTCIceParameters(usernameFragment=remote.username, password=remote.password))
        if self._ice.state != "completed":
            raise NoPath(self.why_no_path())
        digest = ":".join(f"{byte:02X}" for byte in remote.fingerprint)
        await self._dtls.start(RTCDtlsParameters(fingerprints=[RTCDtlsFingerprint("sha-256", digest)]))
        if self._dtls.state != "connected":
            raise LinkError("the secure channel to the other peer could not be set up")
        if isinstance(self._sctp, aiortc_private.SctpTransport):
            self._dtls.go_direct(self._connection, self._sctp.take)
        await self._sctp.start(RTCSctpCapabilities(maxMessageSize=remote.max_message_bytes), remote.sctp_port)
        await self._opened.wait()

    def why_no_path(self) -> str:
        """In words, with what would help; what is known of both sides' NATs is from the candidates."""
        found = "No network path to the other peer was found"
        if self._connection.has_relay:
            return f"{found}, not even through the relay: the other peer's network may block what this one's lets out."
        relay = "The signaling server offers no relay that answers: see docs/relay.md."
        ours = self._connection.is_nat_symmetric
        theirs = len(self._remote_mapped) > len(set(self._remote_mapped))
        if ours or theirs:
            who = "both peers are" if ours and theirs else "this peer is" if ours else "the other peer is"
            return f"{found}: {who} behind a NAT that gives each connection another port, so a relay is needed. {relay}"
        if self._config.stun and not self._connection.has_stun_answer:
            return f"{found}: no STUN server answers this peer, so its network seems to block UDP. {relay}"
        return f"{found}: a firewall or a NAT on one of the two sides lets nothing in. {relay}"

    @property
    def path(self) -> str | None:
        kinds = self._connection.selected_kinds
        if kinds is None:
            return None
        local, remote, address = kinds
        if address == _LOOPBACK:
            return "loopback"
        return "relayed" if "relay" in (local, remote) else "direct"

    @property
    def is_writable(self) -> bool:
        """Little enough is queued below that a slice given now leaves soon; `on_writable` tells when it is again."""
        return self._sctp.wants_more and not self._channel.bufferedAmount

    @property
    def slice_bytes(self) -> int:
        """How large the next slice should be at most."""
        return min(int(self._sctp.slice_bytes), self._max_message_bytes)

    @property
    def retransmitted(self) -> int:
        return self._sctp.retransmitted

    def counters(self) -> aiortc_private.Counters:
        return self._dtls.counters()

    def send(self, frame: bytes) -> None:
        """Raises LinkError when the channel is not open."""
        if self._channel.readyState != "open":
            raise LinkError("the data channel is not open")
        self._channel.send(frame)

    def _message(self, message: bytes | str) -> None:
        if isinstance(message, bytes) and not self._is_closing:
            self._on_message(message)

    def _dtls_changed(self) -> None:
        if self._dtls.state in ("closed", "failed"):
            self._lost()

    def _lost(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._on_closed()

    async def close(self) -> None:
        """At most LINK_CLOSE_SECONDS, whatever state the stack is in."""
        self._is_closing = True
        if self._gathering is not None:
            self._gathering.cancel()
            await asyncio.wait([self._gathering])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.LINK_CLOSE_SECONDS * 0.9):
                await self._sctp.stop()
                await self._dtls.stop()
                await self._ice.stop()


def _sha256_of(fingerprints: list[RTCDtlsFingerprint]) -> str:
    for each in fingerprints:
        if each.algorithm == "sha-256":
            return str(each.value)
    raise LinkError("this release of aiortc gives no SHA-256 fingerprint")
