"""The project's one CBOR decoder (RFC 8949): bounded in depth, size and number, strict about everything.

What is taken: null, true, false, integers of at most 64 bits, finite floats, text, bytes, arrays, and maps whose keys
are text. Refused before anything is built of it: more than `max_bytes`, more than MAX_CBOR_ITEMS values, nesting beyond
MAX_CBOR_DEPTH, a length beyond what is left, trailing bytes, indefinite lengths, duplicate keys, every tag (so also
bignums, shared references and string references), `undefined` and other simple values, surrogates, and text that would
take more than MAX_CBOR_TEXT_BYTES in memory.

The decoder is our own: a library's has to be told of each kind that it must not build, and CVE-2025-68131 and
CVE-2026-26209 are what happens in between. `encode` is cbor2's.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from typing import Any

import cbor2

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_ARGUMENTS = {24: struct.Struct(">B"), 25: struct.Struct(">H"), 26: struct.Struct(">I"), 27: struct.Struct(">Q")}
_FLOATS = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}
_SIMPLES = {20: False, 21: True, 22: None}
_LONG_TEXT_BYTES = 4096
_BEYOND_LATIN_1 = re.compile(rb"[\xc4-\xff]")
_WIDE = re.compile(rb"[\xf0-\xff]")


def encode(value: Any) -> bytes:
    """CBOR of plain values: None, bool, int, float, str, bytes, list and dict with text keys.

    Raises:
        ProtocolError: of a length at which `decode` could refuse it, and it would.
    """
    data = cbor2.dumps(value)
    if len(data) > limits.MAX_CBOR_ITEMS:  # shorter ones have fewer items, and less text than the limit
        _Decoder(data).decode()
    return data


def decode(data: bytes, *, max_bytes: int = limits.MAX_MESSAGE_BYTES) -> Any:
    """The value in `data`, all of it.

    Raises:
        ProtocolError: for anything but one complete, plain, bounded value.
    """
    if len(data) > max_bytes:
        raise ProtocolError(f"a CBOR message of {len(data)} bytes; at most {max_bytes} are allowed")
    return _Decoder(data).decode()


class _Decoder:
    __slots__ = ("_at", "_data", "_items_left", "_text_left")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._items_left = limits.MAX_CBOR_ITEMS
        self._text_left = limits.MAX_CBOR_TEXT_BYTES

    def decode(self) -> Any:
        value = self._value(limits.MAX_CBOR_DEPTH)
        if self._at != len(self._data):
            raise ProtocolError("trailing bytes after a CBOR value")
        return value

    def _value(self, depth: int) -> Any:
        """The value at the present place. `depth` is how many containers may still be opened."""
        kind, low, argument = self._head()
        if kind == _UINT:
            return argument
        if kind == _NEGATIVE:
            return -1 - argument
        if kind == _BYTES:
            start = self._at
            return self._data[start : self._take(argument)]
        if kind == _TEXT:
            return self._text(argument)
        if kind == _SIMPLE:
            return self._simple(low, argument)
        if kind == _TAG:
            raise ProtocolError("CBOR tags are not allowed")
        if depth == 0:
            raise ProtocolError(f"CBOR nested more than {limits.MAX_CBOR_DEPTH} deep")
        return self._array(argument, depth - 1) if kind == _ARRAY else self._map(argument, depth - 1)

    def _head(self) -> tuple[int, int, int]:
        """Major type, the five bits beside it, and the argument (section 3). Counts the item."""
        data, at = self._data, self._at
        if at >= len(data):
            raise ProtocolError("CBOR that is cut short")
        self._items_left -= 1
        if self._items_left < 0:
            raise ProtocolError(f"CBOR of more than {limits.MAX_CBOR_ITEMS} values")
        first = data[at]
        kind, low = first >> 5, first & 0x1F
        if low < 24:
            self._at = at + 1
            return kind, low, low
        form = _ARGUMENTS.get(low)
        if form is None:
            raise ProtocolError("CBOR of indefinite length, or not CBOR")
        end = at + 1 + form.size
        if end > len(data):
            raise ProtocolError("CBOR that is cut short")
        self._at = end
        argument: int = form.unpack_from(data, at + 1)[0]
        return kind, low, argument

    def _take(self, length: int) -> int:
        """Steps over so many bytes; gives their end."""
        end = self._at + length
        if end > len(self._data):
            raise ProtocolError("CBOR that is cut short")
        self._at = end
        return end

    def _text(self, length: int) -> str:
        start = self._at
        end = self._take(length)
        try:
            if length <= _LONG_TEXT_BYTES:
                text = self._data[start:end].decode()
                self._charge(sys.getsizeof(text))
            else:  # looked at first: it could take six times its length
                peak = length * _peak_width(self._data, start, end)
                self._charge(peak)
                text = str(memoryview(self._data)[start:end], "utf-8")
                self._text_left += peak - sys.getsizeof(text)
        except UnicodeDecodeError:
            raise ProtocolError("CBOR text that is not UTF-8") from None
        return text

    def _charge(self, size: int) -> None:
        self._text_left -= size
        if self._text_left < 0:
            raise ProtocolError(f"CBOR text of more than {limits.MAX_CBOR_TEXT_BYTES} bytes in memory")

    def _simple(self, low: int, argument: int) -> Any:
        form = _FLOATS.get(low)
        if form is not None:
            value: float = form.unpack_from(self._data, self._at - form.size)[0]
            if not math.isfinite(value):
                raise ProtocolError("a CBOR float that is not finite")
            return value
        if low not in _SIMPLES:
            raise ProtocolError(f"CBOR simple value {argument} is not allowed")
        return _SIMPLES[low]

    def _count(self, length: int, each: int) -> None:
        """Refuses a container that cannot be complete, before a place is made for its first item."""
        if length * each > len(self._data) - self._at:
            raise ProtocolError("CBOR that is cut short")
        if length * each > self._items_left:
            raise ProtocolError(f"CBOR of more than {limits.MAX_CBOR_ITEMS} values")

    def _array(self, length: int, depth: int) -> list[Any]:
        self._count(length, 1)
        return [self._value(depth) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, Any]:
        self._count(length, 2)
        found: dict[str, Any] = {}
        for _ in range(length):
            kind, _, argument = self._head()
            if kind != _TEXT:
                raise ProtocolError("a CBOR map key that is not text")
            key = self._text(argument)
            if key in found:
                raise ProtocolError("a CBOR map with a key twice")
            found[key] = self._value(depth)
        return found


def _peak_width(data: bytes, start: int, end: int) -> int:
    """Bytes for each byte of UTF-8 text while it becomes a str. A str has one, two or four for each character, as its
    widest needs (PEP 393); the decoder begins with one for each byte, and at a wider character copies what it has."""
    if _WIDE.search(data, start, end):
        return 2 + 4
    return 1 + 2 if _BEYOND_LATIN_1.search(data, start, end) else 1 + 1
