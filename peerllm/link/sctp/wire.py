"""DATA and SACK chunks on the wire (RFC 9260 sections 3.3.1 and 3.3.4)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c

DATA = 0
SACK = 3
LAST_FRAGMENT = 0x01
FIRST_FRAGMENT = 0x02
UNORDERED = 0x04
IMMEDIATE = 0x08
"""RFC 7053: the receiver answers with a SACK at once."""

COMMON_BYTES = 12
DATA_BYTES = 16
SACK_BYTES = 16
MAX_GAPS = 64
"""Gap blocks in one SACK; the oldest matter most."""
MAX_DUPLICATES = 16

_COMMON = struct.Struct("!HHL")
_DATA = struct.Struct("!BBHLHHL")
_SACK = struct.Struct("!BBHLLHH")
_CRC = struct.Struct("<L")
_CHUNK = struct.Struct("!BBH")
_ZERO_CRC = bytes(4)
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")

MODULO = 1 << 32
_HALF = 1 << 31


def distance(newer: int, older: int) -> int:
    """How far `newer` is behind `older`'s number, in serial arithmetic (RFC 1982); negative when it is before it."""
    return ((newer - older + _HALF) & 0xFFFFFFFF) - _HALF


class Prefix:
    """The first eight bytes of every packet in one direction, with their share of the checksum."""

    __slots__ = ("bytes", "crc")

    def __init__(self, source_port: int, destination_port: int, verification_tag: int) -> None:
        self.bytes = _COMMON.pack(source_port, destination_port, verification_tag)
        self.crc: int = google_crc32c.extend(google_crc32c.value(self.bytes), _ZERO_CRC)

    def packet(self, *chunks: bytes) -> bytes:
        """The chunks, padded by the caller, as one packet."""
        crc = self.crc
        for chunk in chunks:
            crc = google_crc32c.extend(crc, chunk)
        return b"".join((self.bytes, _CRC.pack(crc), *chunks))

    def has_sent(self, packet: bytes) -> bool:
        """Whether the packet begins with this prefix and its checksum is right."""
        if packet[:8] != self.bytes:
            return False
        return bool(google_crc32c.extend(self.crc, packet[COMMON_BYTES:]) == _CRC.unpack_from(packet, 8)[0])


def data_chunk(flags: int, tsn: int, stream_id: int, sequence: int, protocol: int, payload: bytes) -> bytes:
    length = DATA_BYTES + len(payload)
    head = _DATA.pack(DATA, flags, length, tsn, stream_id, sequence, protocol)
    return head + payload + _PADDING[length & 3]


def sack_chunk(cumulative: int, window: int, gaps: list[tuple[int, int]], duplicates: list[int]) -> bytes:
    """`gaps` are offsets from the cumulative TSN, both ends included."""
    gaps, duplicates = gaps[:MAX_GAPS], duplicates[:MAX_DUPLICATES]
    numbers = [number for gap in gaps for number in gap]
    return _SACK.pack(
        SACK, 0, SACK_BYTES + 4 * (len(gaps) + len(duplicates)), cumulative, window, len(gaps), len(duplicates)
    ) + struct.pack(f"!{len(numbers)}H{len(duplicates)}L", *numbers, *duplicates)


class DataChunk(NamedTuple):
    flags: int
    tsn: int
    stream_id: int
    sequence: int
    protocol: int
    payload: bytes


class SackChunk(NamedTuple):
    cumulative: int
    window: int
    gaps: list[tuple[int, int]]
    duplicates: tuple[int, ...]


def parse(packet: bytes) -> list[DataChunk | SackChunk] | None:
    """The packet's chunks, or None when it holds any other than DATA and SACK.

    Raises:
        ValueError: a length is out of bounds.
    """
    chunks: list[DataChunk | SackChunk] = []
    at, end = COMMON_BYTES, len(packet)
    while at + 4 <= end:
        kind, flags, length = _CHUNK.unpack_from(packet, at)
        if length < 4 or at + length > end:
            raise ValueError("an SCTP chunk whose length is out of bounds")
        if kind == DATA:
            if length <= DATA_BYTES:
                raise ValueError("a DATA chunk without data")
            _, _, _, tsn, stream_id, sequence, protocol = _DATA.unpack_from(packet, at)
            chunks.append(DataChunk(flags, tsn, stream_id, sequence, protocol, packet[at + DATA_BYTES : at + length]))
        elif kind == SACK:
            chunks.append(_parse_sack(packet, at, length))
        else:
            return None
        at += length + (-length & 3)
    return chunks


def _parse_sack(packet: bytes, at: int, length: int) -> SackChunk:
    if length < SACK_BYTES:
        raise ValueError("a SACK chunk without its numbers")
    _, _, _, cumulative, window, gap_count, duplicate_count = _SACK.unpack_from(packet, at)
    if length != SACK_BYTES + 4 * (gap_count + duplicate_count):
        raise ValueError("a SACK chunk whose counts do not fit its length")
    if not gap_count and not duplicate_count:
        return SackChunk(cumulative, window, [], ())
    numbers = struct.unpack_from(f"!{2 * gap_count}H{duplicate_count}L", packet, at + SACK_BYTES)
    gaps = list(zip(numbers[: 2 * gap_count : 2], numbers[1 : 2 * gap_count : 2], strict=True))
    return SackChunk(cumulative, window, gaps, numbers[2 * gap_count :])
