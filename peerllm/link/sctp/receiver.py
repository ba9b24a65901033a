"""What has arrived: which TSNs, when to say so, and messages out of their fragments."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from peerllm.link.sctp import wire
from peerllm.link.sctp.wire import FIRST_FRAGMENT, IMMEDIATE, LAST_FRAGMENT, UNORDERED, DataChunk
from peerllm.protocol import limits

SACK_DELAY_SECONDS = 0.01
"""For every second packet; RFC 9260 section 6.2 allows 200 ms, which a tail loss probe would mistake for a loss."""
_CHUNK_BYTES = 64
"""What a fragment costs beside its bytes: a flood of fragments of one byte is bounded too."""
_MAX_AHEAD = 1 << 15
"""A TSN so far beyond what has arrived is no honest sender's; gap blocks have 16 bits."""


class Receiver:
    """
    Args:
        last_tsn: the TSN before the first.
        deliver: called with stream, protocol and message for each whole message.
    """

    def __init__(self, last_tsn: int, deliver: Callable[[int, int, bytes], None]) -> None:
        self.cumulative = last_tsn
        self._deliver = deliver
        self._ranges: list[list[int]] = []
        """Beyond the cumulative TSN: [first, last], as distances from `_origin`, sorted, never touching."""
        self._origin = last_tsn
        self._duplicates: list[int] = []
        self._unanswered = 0
        self._is_urgent = False
        self._knows_immediate = False
        self.sack_due: float | None = None
        self._chunks: dict[int, DataChunk] = {}
        self._run_by_first: dict[int, int] = {}
        self._run_by_last: dict[int, int] = {}
        self._held = 0
        self._expected: dict[int, int] = {}
        self._early: dict[tuple[int, int], tuple[int, bytes]] = {}

    # --- Acknowledging ------------------------------------------------------------------------------------------------

    def take(self, chunk: DataChunk, now: float) -> None:
        """One DATA chunk. Afterwards `sack_due` says when an answer is due, if one is.

        Raises:
            ValueError: the sender does not keep to the window that it was told.
        """
        self._unanswered += 1
        if chunk.flags & IMMEDIATE:
            self._knows_immediate = self._is_urgent = True
        if self._ranges:
            self._is_urgent = True  # this one may fill the gap, and the sender is about to judge it lost
        if self._is_new(chunk.tsn):
            self._assemble(chunk)
        else:
            self._is_urgent = True
            if len(self._duplicates) < wire.MAX_DUPLICATES:
                self._duplicates.append(chunk.tsn)
        # A sender that sets the I bit needs no answer in between; another's window grows with every SACK.
        if self._is_urgent or self._ranges or self._unanswered >= 2 or not self._knows_immediate:
            self.sack_due = now
        elif self.sack_due is None:
            self.sack_due = now + SACK_DELAY_SECONDS

    def _is_new(self, tsn: int) -> bool:
        ahead = wire.distance(tsn, self.cumulative)
        if ahead == 1 and not self._ranges:
            self.cumulative = tsn
            return True
        if not 0 < ahead <= _MAX_AHEAD:
            return False
        if not self._ranges:
            self._origin = self.cumulative
        return self._insert(wire.distance(tsn, self._origin))

    def _insert(self, position: int) -> bool:
        ranges = self._ranges
        at = bisect.bisect_right(ranges, position, key=lambda each: each[0])
        if at and ranges[at - 1][1] >= position:
            return False
        touches_left = at > 0 and ranges[at - 1][1] == position - 1
        touches_right = at < len(ranges) and ranges[at][0] == position + 1
        if touches_left and touches_right:
            ranges[at - 1][1] = ranges[at][1]
            del ranges[at]
        elif touches_left:
            ranges[at - 1][1] = position
        elif touches_right:
            ranges[at][0] = position
        else:
            ranges.insert(at, [position, position])
        begin = wire.distance(self.cumulative, self._origin)
        if ranges[0][0] == begin + 1:
            self.cumulative = (self._origin + ranges[0][1]) % wire.MODULO
            del ranges[0]
        return True

    def make_sack(self) -> bytes:
        base = wire.distance(self.cumulative, self._origin)
        gaps = [(first - base, last - base) for first, last in self._ranges]
        window = max(0, limits.MAX_SCTP_RECEIVE_BYTES - self._held)
        chunk = wire.sack_chunk(self.cumulative, window, gaps, self._duplicates)
        self._duplicates = []
        self._unanswered = 0
        self._is_urgent = False
        self.sack_due = None
        return chunk

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _assemble(self, chunk: DataChunk) -> None:
        if chunk.flags & 3 == 3:
            self._finish(chunk, chunk.payload)
            return
        tsn = chunk.tsn
        self._hold(len(chunk.payload) + _CHUNK_BYTES)
        self._chunks[tsn] = chunk
        first = last = tsn
        before, after = (tsn - 1) % wire.MODULO, (tsn + 1) % wire.MODULO
        # Runs never cross from one message into the next: a first fragment joins nothing before it.
        if not chunk.flags & FIRST_FRAGMENT and before in self._run_by_last:
            first = self._run_by_last.pop(before)
            del self._run_by_first[first]
        if not chunk.flags & LAST_FRAGMENT and after in self._run_by_first:
            last = self._run_by_first.pop(after)
            del self._run_by_last[last]
        if self._chunks[first].flags & FIRST_FRAGMENT and self._chunks[last].flags & LAST_FRAGMENT:
            count = (last - first) % wire.MODULO + 1
            parts = [self._chunks.pop((first + index) % wire.MODULO) for index in range(count)]
            payload = b"".join([part.payload for part in parts])
            self._held -= len(payload) + _CHUNK_BYTES * count
            self._finish(parts[0], payload)
        else:
            self._run_by_first[first] = last
            self._run_by_last[last] = first

    def _finish(self, first: DataChunk, payload: bytes) -> None:
        if first.flags & UNORDERED:
            self._deliver(first.stream_id, first.protocol, payload)
            return
        stream = first.stream_id
        expected = self._expected.get(stream, 0)
        if first.sequence != expected:
            self._early[stream, first.sequence] = (first.protocol, payload)
            self._hold(len(payload) + _CHUNK_BYTES)
            return
        protocol = first.protocol
        while True:
            expected = (expected + 1) & 0xFFFF
            self._expected[stream] = expected
            self._deliver(stream, protocol, payload)
            waiting = self._early.pop((stream, expected), None)
            if waiting is None:
                return
            protocol, payload = waiting
            self._held -= len(payload) + _CHUNK_BYTES

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > 2 * limits.MAX_SCTP_RECEIVE_BYTES:  # twice: what was on its way when the window shrank
            raise ValueError("more SCTP fragments than the receive window holds")

    @property
    def held_bytes(self) -> int:
        """Arrived and not yet part of a message that was delivered."""
        return self._held
