"""How many bytes hidden states take on the wire: checked before anything is allocated."""

from __future__ import annotations

from peerllm.protocol.errors import ProtocolError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes that may appear on the wire, with the bytes of one element."""
CODECS = ("exact", "int8")
INT8_GROUP = 64
"""int8: one scale for so many values of a row; a row's code never depends on the block's other rows."""


def wire_bytes(codec: str, dtype: str, rows: int, width: int) -> int:
    """Bytes of `[rows, width]` hidden states. exact: elements of `dtype`, row-major, little-endian. int8: all codes
    (one byte an element, rows padded to whole groups) and then all scales (float32, one a group).

    Raises:
        ProtocolError: codec or dtype is not on the list.
    """
    if dtype not in DTYPE_BYTES:
        raise ProtocolError(f"hidden states of dtype {dtype[:32]!r} are not allowed")
    if codec == "exact":
        return rows * width * DTYPE_BYTES[dtype]
    if codec == "int8":
        groups = -(-width // INT8_GROUP)
        return rows * groups * (INT8_GROUP + 4)
    raise ProtocolError(f"codec {codec[:32]!r} is not known")


def check_wire_bytes(data: bytes, codec: str, dtype: str, rows: int, width: int) -> None:
    """Raises ProtocolError unless `data` is exactly `[rows, width]` hidden states."""
    expected = wire_bytes(codec, dtype, rows, width)
    if len(data) != expected:
        raise ProtocolError(f"hidden states of {rows} rows take {expected} bytes; {len(data)} came")


def slice_rows(data: bytes, codec: str, dtype: str, rows: int, width: int, first: int, last: int) -> bytes:
    """Rows `[first, last)` of `[rows, width]` hidden states, still encoded. Raises ProtocolError as the others do."""
    check_wire_bytes(data, codec, dtype, rows, width)
    if not 0 <= first <= last <= rows:
        raise ProtocolError(f"rows {first}:{last} of {rows}")
    if codec == "exact":
        size = width * DTYPE_BYTES[dtype]
        return data[first * size : last * size]
    groups = -(-width // INT8_GROUP)
    codes, scales = groups * INT8_GROUP, groups * 4
    split = rows * codes
    return data[first * codes : last * codes] + data[split + first * scales : split + last * scales]
