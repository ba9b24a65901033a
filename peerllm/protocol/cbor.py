"""The project's one CBOR decoder: bounded in depth, size and kind, strict about everything.

What is refused: more than `max_bytes`, trailing bytes, nesting beyond `limits.MAX_CBOR_DEPTH`, indefinite lengths,
duplicate keys, map keys that are not text, every tag (so also bignums, shared references and string references),
`undefined`, simple values, and NaN or infinite floats. See bugs.md 22's kind: CVE-2025-68131, CVE-2026-26209.
"""

from __future__ import annotations

import io
import math
from typing import Any, NoReturn

import cbor2

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError


def _refuse_tag(tag: cbor2.CBORTag, immutable: bool) -> NoReturn:
    raise ProtocolError(f"CBOR tag {tag.tag} is not allowed")


def _refuse_known_tag(decoder: Any, *_: Any) -> NoReturn:
    raise ProtocolError("CBOR tags are not allowed")


# cbor2 handles these tags itself before it asks the tag hook: replace each of its handlers.
_KNOWN_TAGS = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43000, 52, 54, 100, 256, 258, 260, 261, 1004, 55799)
_SEMANTIC_DECODERS = dict.fromkeys(_KNOWN_TAGS, _refuse_known_tag)


def encode(value: Any) -> bytes:
    """Canonical-length CBOR of plain values: None, bool, int, float, str, bytes, list and dict with text keys."""
    return cbor2.dumps(value)


def decode(data: bytes, *, max_bytes: int = limits.MAX_MESSAGE_BYTES) -> Any:
    """The value in `data`, all of it.

    Raises:
        ProtocolError: for anything but one complete, plain, bounded value.
    """
    if len(data) > max_bytes:
        raise ProtocolError(f"a CBOR message of {len(data)} bytes; at most {max_bytes} are allowed")
    stream = io.BytesIO(data)
    try:
        decoder = cbor2.CBORDecoder(
            stream,
            tag_hook=_refuse_tag,
            semantic_decoders=_SEMANTIC_DECODERS,
            str_errors="strict",
            read_size=1,
            max_depth=limits.MAX_CBOR_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
        value = decoder.decode()
    except ProtocolError:
        raise
    except Exception as error:
        # cbor2 lets errors of the types that it builds escape (ValueError, OverflowError, RecursionError, ...).
        raise ProtocolError(f"not valid CBOR: {type(error).__name__}") from error
    if stream.tell() != len(data):
        raise ProtocolError("trailing bytes after a CBOR value")
    _check_plain(value)
    return value


def _check_plain(value: Any) -> None:
    """Refuses what the decoder lets through: keys that are not text, floats that are not numbers, other types."""
    kind = type(value)
    if kind in (int, str, bytes, bool) or value is None:
        return
    if kind is float:
        if not math.isfinite(value):
            raise ProtocolError("a CBOR float that is not finite")
        return
    if kind is list:
        for item in value:
            if type(item) is not int:  # a block's candidates: thousands of integers need no call each
                _check_plain(item)
        return
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError("a CBOR map key that is not text")
            _check_plain(item)
        return
    raise ProtocolError(f"a CBOR value of type {kind.__name__} is not allowed")
