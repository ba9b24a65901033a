"""Packets of DATA and SACK: what aiortc reads and writes, and what no honest peer sends."""

from __future__ import annotations

import contextlib
import struct

import pytest
from aiortc import rtcsctptransport as stock
from hypothesis import given
from hypothesis import strategies as st

from peerllm.link.sctp import wire
from peerllm.link.sctp.wire import DataChunk, Prefix, SackChunk


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1160])
def test_aiortc_reads_our_data(size: int) -> None:
    packet = Prefix(5000, 5001, 77).packet(wire.data_chunk(7, 9, 3, 5, 53, b"x" * size))
    source, destination, tag, chunks = stock.parse_packet(packet)
    chunk = chunks[0]
    assert (source, destination, tag) == (5000, 5001, 77)
    assert isinstance(chunk, stock.DataChunk)
    assert (chunk.flags, chunk.tsn, chunk.stream_id, chunk.stream_seq, chunk.protocol) == (7, 9, 3, 5, 53)
    assert chunk.user_data == b"x" * size


def test_aiortc_reads_our_sack_beside_data() -> None:
    sack = wire.sack_chunk(100, 9_000, [(2, 3), (5, 9)], [98, 99])
    packet = Prefix(5000, 5000, 1).packet(sack, wire.data_chunk(3, 1, 0, 0, 53, b"data"))
    first, second = stock.parse_packet(packet)[3]
    assert (first.cumulative_tsn, first.advertised_rwnd) == (100, 9_000)
    assert (first.gaps, first.duplicates) == ([(2, 3), (5, 9)], [98, 99])
    assert second.user_data == b"data"


def test_we_read_what_aiortc_writes() -> None:
    sack = stock.SackChunk()
    sack.cumulative_tsn, sack.advertised_rwnd, sack.gaps, sack.duplicates = 7, 1000, [(2, 2)], [3]
    packet = stock.serialize_packet(5000, 5001, 7, sack)
    assert Prefix(5000, 5001, 7).has_sent(packet)
    assert wire.parse(packet) == [SackChunk(7, 1000, [(2, 2)], (3,))]
    data = stock.DataChunk(flags=stock.SCTP_DATA_FIRST_FRAG)
    data.tsn, data.stream_id, data.stream_seq, data.protocol, data.user_data = 1, 2, 3, 53, b"abc"
    assert wire.parse(stock.serialize_packet(1, 2, 3, data)) == [DataChunk(2, 1, 2, 3, 53, b"abc")]


def test_a_packet_of_another_association_or_with_a_flipped_bit_is_not_ours() -> None:
    packet = bytearray(Prefix(5000, 5000, 7).packet(wire.data_chunk(7, 1, 0, 0, 53, b"data")))
    assert not Prefix(5000, 5000, 8).has_sent(bytes(packet))
    packet[-1] ^= 1
    assert not Prefix(5000, 5000, 7).has_sent(bytes(packet))


def test_a_packet_with_another_kind_of_chunk_is_left_to_aiortc() -> None:
    assert wire.parse(stock.serialize_packet(1, 2, 3, stock.CookieAckChunk())) is None


@pytest.mark.parametrize(
    "chunk",
    [
        struct.pack("!BBH", 0, 0, 3),
        struct.pack("!BBH", 0, 0, 400),
        struct.pack("!BBHLHHL", 0, 3, 16, 1, 0, 0, 53),  # no data
        struct.pack("!BBHL", 3, 0, 8, 1),
        struct.pack("!BBHLLHH", 3, 0, 16, 1, 0, 60_000, 0),  # more gaps than it has bytes
    ],
)
def test_lengths_out_of_bounds_are_refused(chunk: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        wire.parse(bytes(12) + chunk)


@given(st.binary(max_size=200))
def test_any_bytes_give_chunks_or_a_value_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        wire.parse(bytes(12) + content)


def test_distance_is_serial_arithmetic() -> None:
    assert wire.distance(2, 0xFFFFFFFF) == 3
    assert wire.distance(0xFFFFFFFF, 2) == -3
    assert wire.distance(5, 5) == 0
