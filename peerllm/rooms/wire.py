"""What two peers say to each other over a signaling server: the first byte is the kind, the rest as below.

    GREETING   "PLLM" | format | lowest version | highest version | SPAKE2 element (33 bytes) [| anything later]
    CONFIRM    kind | HMAC (32 bytes) | sealed Credentials
    DONE       kind | HMAC (32 bytes)
    REFUSED    kind | reason | lowest version | highest version
    BEGIN      kind | attempt (8 bytes) | lowest version | highest version | Noise KK's first message
    ANSWER     kind | attempt | version | Noise KK's second message
    SEALED     kind | attempt | counter (8 bytes) | ciphertext of (what: 1 byte | body)
    UNEQUAL    kind | attempt | lowest version | highest version

Versions have two bytes, big-endian. GREETING never changes, so that unequal releases can say that they are: everything
else belongs to the version that both have. Versions here are of these messages; the link's HELLO has its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import ProtocolError, VersionMismatch
from peerllm.protocol.fields import checked, from_map, nested_list, to_map, uint

MAGIC = b"PLLM"
FORMAT = 1
ELEMENT_BYTES = 33
KEY_BYTES = 32
MAC_BYTES = 32
ATTEMPT_BYTES = 8

CONFIRM, DONE, REFUSED = 0x02, 0x03, 0x04
BEGIN, ANSWER, SEALED, UNEQUAL = 0x11, 0x12, 0x13, 0x14

WRONG_CODE, UNEQUAL_RELEASES, MALFORMED = 1, 2, 3
"""Reasons of REFUSED."""

START, BODY, INTRODUCTION = 0, 1, 2
"""What a sealed message is: the one that completes the handshake, the link's own, and a further peer's key."""

_GREETING = struct.Struct(">4sBHH")
_REFUSED = struct.Struct(">BBHH")
_RANGE = struct.Struct(">HH")
_SEALED = struct.Struct(f">B{ATTEMPT_BYTES}sQ")


class Versions(NamedTuple):
    """Of the messages after the greeting: those that a release can speak."""

    low: int
    high: int

    def common(self, other: Versions) -> int:
        """The highest that both speak.

        Raises:
            VersionMismatch: there is none; names both ranges.
        """
        best = min(self.high, other.high)
        if best < max(self.low, other.low) or other.low > other.high:
            older = "The other peer's" if other.high < self.low else "This"
            raise VersionMismatch(
                f"The two releases of peerllm do not understand each other: this one speaks versions {self}, the other "
                f"peer's {other}. {older} peerllm has to be updated."
            )
        return best

    def __str__(self) -> str:
        return f"{self.low} to {self.high}" if self.low != self.high else f"{self.low}"


VERSIONS = Versions(1, 1)
"""What this release speaks."""


def _key(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != KEY_BYTES:
        raise ValueError(f"not a key of {KEY_BYTES} bytes")
    return value


@dataclass(frozen=True, slots=True)
class Introduction:
    """A further peer of the room: the opener vouches for its key."""

    key: bytes = checked(_key)
    place: int = uint(limits.MAX_PEERS)
    """In the room's chain; the opener has 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Each side's part of the confirmation: its long-term key, and the versions as it said and as it heard them."""

    key: bytes = checked(_key)
    said_low: int = uint(0xFFFF)
    said_high: int = uint(0xFFFF)
    heard_low: int = uint(0xFFFF)
    heard_high: int = uint(0xFFFF)
    place: int = uint(limits.MAX_PEERS, default=0)
    """The opener tells the joiner its place in the room's chain."""
    introductions: tuple[Introduction, ...] = nested_list(Introduction, limits.MAX_INTRODUCTIONS, default=())

    def encode(self) -> bytes:
        return cbor.encode(to_map(self))

    @classmethod
    def decode(cls, data: bytes) -> Credentials:
        return from_map(cls, cbor.decode(data, max_bytes=limits.MAX_SIGNALING_BYTES))


def pack_greeting(versions: Versions, element: bytes) -> bytes:
    return _GREETING.pack(MAGIC, FORMAT, *versions) + element


def unpack_greeting(data: bytes) -> tuple[Versions, bytes]:
    """Raises ProtocolError for anything that no release of peerllm says."""
    if not _GREETING.size + ELEMENT_BYTES <= len(data) <= limits.MAX_GREETING_BYTES:
        raise ProtocolError("a greeting of the wrong length")
    magic, format_, low, high = _GREETING.unpack_from(data)
    if magic != MAGIC or format_ != FORMAT:
        raise ProtocolError("a greeting that is not peerllm's")
    return Versions(low, high), data[_GREETING.size : _GREETING.size + ELEMENT_BYTES]


def pack_refused(reason: int, versions: Versions) -> bytes:
    return _REFUSED.pack(REFUSED, reason, *versions)


def unpack_refused(data: bytes) -> tuple[int, Versions]:
    if len(data) != _REFUSED.size:
        raise ProtocolError("a refusal of the wrong length")
    _, reason, low, high = _REFUSED.unpack(data)
    return reason, Versions(low, high)


def split(data: bytes, kind: int, *lengths: int) -> list[bytes]:
    """The parts after the kind: one of each length, and the rest.

    Raises:
        ProtocolError: another kind, or too short.
    """
    if not data or data[0] != kind:
        raise ProtocolError(f"a message of kind {data[0] if data else 'none'} where kind {kind} was due")
    parts, start = [], 1
    for length in lengths:
        parts.append(data[start : start + length])
        start += length
    if len(data) < start:
        raise ProtocolError("a message that is cut short")
    return [*parts, data[start:]]


def pack_range(versions: Versions) -> bytes:
    return _RANGE.pack(*versions)


def unpack_range(data: bytes) -> Versions:
    """Of exactly four bytes."""
    return Versions(*_RANGE.unpack(data))


def sealed_header(attempt: bytes, counter: int) -> bytes:
    return _SEALED.pack(SEALED, attempt, counter)


def unpack_sealed(data: bytes) -> tuple[bytes, int, bytes]:
    """Attempt, counter, ciphertext."""
    if len(data) < _SEALED.size:
        raise ProtocolError("a sealed message that is cut short")
    _, attempt, counter = _SEALED.unpack_from(data)
    return attempt, counter, data[_SEALED.size :]
