"""What the sender keeps so that a peer that lost rows gets them back: the boundary's hidden states, still encoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peerllm.protocol.tensors import slice_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded hidden states of rows `[start, start + rows)`."""

    start: int
    rows: int
    hidden: bytes


class ReplayLog:
    """Rows `[0, length)` in order. Rows of rejected candidates are never added."""

    def __init__(self, codec: str, dtype: str, width: int) -> None:
        self._codec = codec
        self._dtype = dtype
        self._width = width
        self._kept: list[Rows] = []
        self.length = 0

    def add(self, start: int, rows: int, hidden: bytes, *, keep: int | None = None) -> None:
        """Takes the first `keep` (all, if None) of `rows` rows, which follow on what is here.

        Raises:
            ValueError: the rows leave a gap or repeat some.
        """
        if start != self.length:
            raise ValueError(f"rows from {start} on cannot follow {self.length} rows")
        kept = rows if keep is None else keep
        if kept != rows:
            hidden = slice_rows(hidden, self._codec, self._dtype, rows, self._width, 0, kept)
        self._kept.append(Rows(start, kept, hidden))
        self.length = start + kept

    def since(self, length: int) -> Iterator[Rows]:
        """The rows from `length` on, in the pieces in which they came."""
        for piece in self._kept:
            end = piece.start + piece.rows
            if end <= length:
                continue
            if piece.start >= length:
                yield piece
                continue
            first = length - piece.start
            hidden = slice_rows(piece.hidden, self._codec, self._dtype, piece.rows, self._width, first, piece.rows)
            yield Rows(length, end - length, hidden)
