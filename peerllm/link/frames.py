"""Frames: what one message of the data channel holds.

    kind u8 | urgency u8 | epoch u32 | body                                     all but DATA
    kind u8 | urgency u8 | epoch u32 | id u32 | offset u32 | total u32 | piece  DATA

Numbers are big-endian. A message is cut into pieces; `id` counts the messages of an urgency from 0.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from peerllm.link.config import Urgency
from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError

_PREFIX = struct.Struct("!BBI")
_DATA = struct.Struct("!BBIIII")
_U64 = struct.Struct("!Q")

HEADER_BYTES = _DATA.size
MAX_FRAME_BYTES = limits.MAX_SLICE_BYTES
MAX_PIECE_BYTES = MAX_FRAME_BYTES - HEADER_BYTES


class Kind(enum.IntEnum):
    DATA = 0
    HELLO = 1
    """This side's body, padded."""
    CONFIRM = 2
    """The MAC over both bodies."""
    START = 3
    """The controlling side took this connection: it is UP."""
    REFUSE = 4
    """This side will not go on: a code and the reason."""
    PING = 5
    PONG = 6
    CREDIT = 7
    """Bytes of messages that were processed since the epoch began."""


class Frame(NamedTuple):
    kind: Kind
    urgency: Urgency
    epoch: int
    body: bytes
    id: int = 0
    offset: int = 0
    total: int = 0


_KINDS = {int(kind): kind for kind in Kind}
_URGENCIES = {int(urgency): urgency for urgency in Urgency}


def encode_control(kind: Kind, epoch: int, body: bytes = b"") -> bytes:
    return _PREFIX.pack(kind, Urgency.CONTROL, epoch) + body


def encode_data(urgency: Urgency, epoch: int, message_id: int, offset: int, total: int, piece: bytes) -> bytes:
    return _DATA.pack(Kind.DATA, urgency, epoch, message_id, offset, total) + piece


def decode(data: bytes) -> Frame | None:
    """The frame, or None for a kind of a later release.

    Raises:
        ProtocolError: it is too short, too long, or its numbers contradict each other.
    """
    if not _PREFIX.size <= len(data) <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes")
    number, urgency_number, epoch = _PREFIX.unpack_from(data)
    kind = _KINDS.get(number)
    if kind is None:
        return None
    urgency = _URGENCIES.get(urgency_number)
    if urgency is None:
        raise ProtocolError(f"a frame of urgency {urgency_number}")
    if kind is not Kind.DATA:
        return Frame(kind, urgency, epoch, data[_PREFIX.size :])
    if len(data) < HEADER_BYTES:
        raise ProtocolError("a data frame without its header")
    _, _, _, message_id, offset, total = _DATA.unpack_from(data)
    piece = data[HEADER_BYTES:]
    if total > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {total} bytes; at most {limits.MAX_MESSAGE_BYTES} are allowed")
    if offset + len(piece) > total or (not piece and total):
        raise ProtocolError("a piece that is not inside its message")
    return Frame(kind, urgency, epoch, piece, message_id, offset, total)


def encode_number(number: int) -> bytes:
    return _U64.pack(number)


def decode_number(body: bytes) -> int:
    """Raises ProtocolError unless `body` is one number of 8 bytes."""
    if len(body) != _U64.size:
        raise ProtocolError("a frame whose number is not 8 bytes")
    return int(_U64.unpack(body)[0])
