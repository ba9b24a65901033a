import pytest

from peerllm.decoding.replay import ReplayLog
from peerllm.protocol.tensors import wire_bytes


def exact_rows(first: int, count: int, width: int = 4) -> bytes:
    return b"".join(bytes([row]) * (2 * width) for row in range(first, first + count))


def test_rows_come_back_from_any_length_on() -> None:
    log = ReplayLog("exact", "float16", 4)
    log.add(0, 3, exact_rows(0, 3))
    log.add(3, 5, exact_rows(3, 5), keep=2)
    assert log.length == 5
    for length in range(6):
        pieces = list(log.since(length))
        assert b"".join(piece.hidden for piece in pieces) == exact_rows(length, 5 - length)
        assert sum(piece.rows for piece in pieces) == 5 - length
        assert [piece.start for piece in pieces] == [
            max(length, start) for start in (0, 3) if (start + 3 if start == 0 else 5) > length
        ]


def test_int8_rows_keep_their_scales() -> None:
    log = ReplayLog("int8", "float16", 64)
    codes = b"".join(bytes([row]) * 64 for row in range(3))
    scales = b"".join(bytes([100 + row]) * 4 for row in range(3))
    log.add(0, 3, codes + scales)
    (piece,) = log.since(1)
    assert piece.hidden == codes[64:] + scales[4:]
    assert len(piece.hidden) == wire_bytes("int8", "float16", 2, 64)


def test_a_gap_or_a_repeated_row_is_refused() -> None:
    log = ReplayLog("exact", "float16", 4)
    log.add(0, 1, exact_rows(0, 1))
    for start in (0, 2):
        with pytest.raises(ValueError, match="cannot follow"):
            log.add(start, 1, exact_rows(0, 1))
