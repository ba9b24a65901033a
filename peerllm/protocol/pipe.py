"""Frames between the daemon and its engine worker: JSON header, then raw bytes. Standard library only.

    frame = uint32 length of the rest | uint32 length of the header | header (JSON, UTF-8) | payload (raw bytes)

Both ends are ours and on one machine; bounds are kept all the same, so that a fault is an error and not a hang.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError

_LENGTHS = struct.Struct("<II")


def encode_frame(header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The frame as buffers to write in this order."""
    head = json.dumps(header, separators=(",", ":")).encode()
    length = 4 + len(head) + len(payload)
    if len(head) > limits.MAX_PIPE_HEADER_BYTES or length > limits.MAX_PIPE_FRAME_BYTES:
        raise ProtocolError(f"a pipe frame of {length} bytes is too large")
    buffers: list[bytes | memoryview] = [_LENGTHS.pack(length, len(head)) + head]
    if len(payload):
        buffers.append(payload)
    return buffers


class FrameReader:
    """Sans-I/O: bytes in, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields (header, payload) for each frame that is complete.

        Raises:
            ProtocolError: lengths out of bounds or a header that is not a JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            length, head_length = _LENGTHS.unpack_from(self._buffer)
            if length > limits.MAX_PIPE_FRAME_BYTES or head_length > min(limits.MAX_PIPE_HEADER_BYTES, length - 4):
                raise ProtocolError("a pipe frame with lengths out of bounds")
            if len(self._buffer) < 4 + length:
                return
            head_end = _LENGTHS.size + head_length
            try:
                header = json.loads(self._buffer[_LENGTHS.size : head_end])
            except ValueError as error:
                raise ProtocolError("a pipe frame whose header is not JSON") from error
            if not isinstance(header, dict):
                raise ProtocolError("a pipe frame whose header is not a JSON object")
            payload = bytes(self._buffer[head_end : 4 + length])
            del self._buffer[: 4 + length]
            yield header, payload
