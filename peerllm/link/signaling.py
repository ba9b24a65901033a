"""What a link needs of the room, and what two links say to each other through it, as plain validated values.

Bodies are sealed by the room. There is no SDP: a description holds the few values that ICE, DTLS and SCTP need, and
candidates follow as they are found.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Protocol

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.fields import checked, choice, flag, from_map, nested_list, to_map, uint

VERSION = 1
"""Of what links say to each other. A side states the range that it speaks; the ranges have to overlap."""

_ICE_CHARS = re.compile(r"[a-zA-Z0-9+/]+")


class Attempt(Protocol):
    """One attempt to connect; a fresh handshake made its keys."""

    epoch: int
    session_key: bytes
    """32 bytes, the same on both sides."""

    async def send(self, body: bytes) -> None:
        """Sealed, in order, at most MAX_SIGNALING_BYTES."""

    async def receive(self) -> bytes:
        """The next body. Raises PeerAway or RoomError."""


class SeatedPeer(Protocol):
    """An authenticated peer. The side whose `local_id` is smaller controls ICE and picks the epochs."""

    local_id: bytes
    remote_id: bytes
    is_opener: bool

    async def begin(self, epoch: int) -> Attempt:
        """A new attempt; the controlling side's to call. Raises RoomClosed when there can be none any more."""

    async def accept(self) -> Attempt:
        """The newest attempt that the controlling side began. Raises RoomClosed when there can be none any more."""

    def suspect(self) -> None:
        """The link is suspect, so the way to the signaling server may be gone too: it is looked at now."""

    async def close(self) -> None: ...


def _ice_text(minimum: int, maximum: int) -> Any:
    def check(value: Any) -> str:
        if type(value) is not str or not minimum <= len(value) <= maximum or not _ICE_CHARS.fullmatch(value):
            raise ValueError(f"not {minimum} to {maximum} ICE characters (RFC 8839 section 5.4)")
        return value

    return checked(check)


def _address(value: Any) -> str:
    if type(value) is not str or len(value) > 45:
        raise ValueError("not an IP address")
    return str(ipaddress.ip_address(value))  # ValueError on names and on anything else that is no literal


def _message_bytes(value: Any) -> int:
    if type(value) is not int or not (value == 0 or 2 * limits.MAX_HELLO_BYTES <= value < 1 << 32):
        raise ValueError(f"neither 0 nor a number from {2 * limits.MAX_HELLO_BYTES}")
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise ValueError("not a SHA-256 digest")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One address at which a peer may be reached over UDP (RFC 8839 section 5.1)."""

    address: str = checked(_address)
    port: int = uint(65535, minimum=1)
    kind: str = choice(("host", "srflx", "relay"))
    priority: int = uint((1 << 31) - 1, minimum=1)
    foundation: str = _ice_text(1, 32)

    def is_usable(self, *, loopback: bool) -> bool:
        """False for addresses that no peer of ours has any reason to name."""
        ip = ipaddress.ip_address(self.address)
        if ip.is_multicast or ip.is_unspecified or ip.is_link_local or self.address == "255.255.255.255":
            return False
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        if mapped is not None:
            return False
        return loopback or not ip.is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that the other side needs before it can begin; `candidates` are those already known."""

    oldest: int = uint(65535, minimum=1, default=VERSION)
    newest: int = uint(65535, minimum=1, default=VERSION)
    username: str = _ice_text(4, 256)
    password: str = _ice_text(22, 256)
    fingerprint: bytes = checked(_digest)
    """SHA-256 of the DTLS certificate."""
    sctp_port: int = uint(65535, minimum=1)
    max_message_bytes: int = checked(_message_bytes)
    """What this side's data channel takes in one piece (RFC 8841 section 6); 0 is no limit. A HELLO has to fit."""
    candidates: tuple[Candidate, ...] = nested_list(Candidate, limits.MAX_REMOTE_CANDIDATES, default=())
    direct_only: bool = flag(default=False)
    """This attempt looks for a path without a relay; the other side's is of no use to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreCandidates:
    """Candidates that were found later; `last` says that no more will come."""

    candidates: tuple[Candidate, ...] = nested_list(Candidate, limits.MAX_REMOTE_CANDIDATES, default=())
    last: bool = flag(default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleEpoch:
    """The attempt's epoch is not above the `epoch` that this side had: its peer was started anew."""

    epoch: int = uint((1 << 32) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAgain:
    """The controlled side asks for a new attempt at once: its addresses changed, and it cannot begin one itself."""


_KINDS: dict[str, type[Any]] = {
    "description": Description,
    "candidates": MoreCandidates,
    "stale": StaleEpoch,
    "again": BeginAgain,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

Body = Description | MoreCandidates | StaleEpoch | BeginAgain


def encode_body(body: Body) -> bytes:
    return cbor.encode({"k": _NAMES[type(body)], **to_map(body)})


def decode_body(data: bytes) -> Body | None:
    """The body, or None for a kind of a later release, which is passed over.

    Raises:
        ProtocolError: anything else that is wrong.
    """
    value = cbor.decode(data, max_bytes=limits.MAX_SIGNALING_BYTES)
    if not isinstance(value, dict) or type(value.get("k")) is not str:
        raise ProtocolError("a signaling body without a kind")
    kind = _KINDS.get(value["k"])
    if kind is None:
        return None
    body: Body = from_map(kind, value)
    return body
