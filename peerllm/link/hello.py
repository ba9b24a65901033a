"""HELLO: each side's body, and the proof that both saw the same channel.

The MAC binds the attempt's keys, which the room authenticated, to the DTLS channel that was reached: role, epoch, both
certificates' fingerprints and both bodies.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError

_LENGTH = struct.Struct("!I")


def encode_hello(body: bytes) -> bytes:
    """Length, body, and padding up to a full packet.

    Raises:
        ProtocolError: the body is longer than MAX_HELLO_BYTES.
    """
    if len(body) > limits.MAX_HELLO_BYTES:
        raise ProtocolError(f"a HELLO of {len(body)} bytes; at most {limits.MAX_HELLO_BYTES} are allowed")
    return (_LENGTH.pack(len(body)) + body).ljust(limits.MIN_HELLO_BYTES, b"\0")


def decode_hello(data: bytes) -> bytes:
    if len(data) < _LENGTH.size:
        raise ProtocolError("a HELLO without a length")
    (length,) = _LENGTH.unpack_from(data)
    if length > limits.MAX_HELLO_BYTES or _LENGTH.size + length > len(data):
        raise ProtocolError("a HELLO whose length is out of bounds")
    return data[_LENGTH.size : _LENGTH.size + length]


def mac(
    key: bytes,
    *,
    from_controlling: bool,
    epoch: int,
    controlling_fingerprint: bytes,
    controlled_fingerprint: bytes,
    controlling_body: bytes,
    controlled_body: bytes,
) -> bytes:
    """HMAC-SHA256 over everything, each part with its length, so that no two inputs read the same."""
    parts = (
        b"peerllm link hello 1",
        b"controlling" if from_controlling else b"controlled",
        struct.pack("!I", epoch),
        controlling_fingerprint,
        controlled_fingerprint,
        controlling_body,
        controlled_body,
    )
    return hmac.new(key, b"".join(_LENGTH.pack(len(part)) + part for part in parts), hashlib.sha256).digest()
