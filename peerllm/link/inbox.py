"""Whole messages out of pieces that arrive in any order, bounded in every way."""

from __future__ import annotations

from collections import deque

from peerllm.link.config import Urgency
from peerllm.link.frames import Frame
from peerllm.link.outbox import cost
from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError


class _Partial:
    __slots__ = ("pieces", "received", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.received = 0
        self.pieces: dict[int, bytes] = {}

    def add(self, offset: int, piece: bytes) -> None:
        if offset in self.pieces:
            raise ProtocolError("the same piece of a message came twice")
        self.pieces[offset] = piece
        self.received += len(piece)
        if self.received > self.total:
            raise ProtocolError("pieces of a message overlap")

    @property
    def is_whole(self) -> bool:
        return bool(self.pieces) and self.received == self.total

    def join(self) -> bytes:
        at = 0
        parts = []
        for offset in sorted(self.pieces):
            if offset != at:
                raise ProtocolError("pieces of a message overlap")
            parts.append(self.pieces[offset])
            at += len(self.pieces[offset])
        return b"".join(parts)


class Inbox:
    """Sans-I/O, one for each epoch. Messages come out in the order of their ids within an urgency."""

    def __init__(self) -> None:
        self._partial: dict[tuple[Urgency, int], _Partial] = {}
        self._expected = dict.fromkeys(Urgency, 0)
        self._whole: dict[Urgency, deque[bytes]] = {urgency: deque() for urgency in Urgency}
        self._held = 0
        self._processed = 0
        self._reported = 0

    def feed(self, frame: Frame) -> bool:
        """Takes one DATA frame; True when `pop` has something new.

        Raises:
            ProtocolError: pieces contradict each other, or the peer sent more than its credit.
        """
        key = (frame.urgency, frame.id)
        partial = self._partial.get(key)
        if partial is None:
            if (frame.id - self._expected[frame.urgency]) & 0xFFFFFFFF > 0x7FFFFFFF:
                raise ProtocolError("a piece of a message that is complete")
            self._held += cost(frame.total)
            if self._held > limits.MAX_UNPROCESSED_BYTES:
                raise ProtocolError("the peer sent more than it may before it is processed")
            partial = self._partial[key] = _Partial(frame.total)
        if partial.total != frame.total:
            raise ProtocolError("pieces of a message disagree on its length")
        partial.add(frame.offset, frame.body)
        return partial.is_whole and self._release(frame.urgency)

    def _release(self, urgency: Urgency) -> bool:
        released = False
        while True:
            key = (urgency, self._expected[urgency])
            partial = self._partial.get(key)
            if partial is None or not partial.is_whole:
                return released
            del self._partial[key]
            self._expected[urgency] = (self._expected[urgency] + 1) & 0xFFFFFFFF
            self._whole[urgency].append(partial.join())
            released = True

    def pop(self) -> bytes | None:
        """The next whole message, the most urgent first; whoever pops it processes it."""
        for queue in self._whole.values():
            if queue:
                message = queue.popleft()
                self._held -= cost(len(message))
                self._processed += cost(len(message))
                return message
        return None

    def credit_due(self) -> int | None:
        """What to report as processed, when enough of it is new; asking counts as reporting."""
        if self._processed - self._reported < limits.MAX_UNPROCESSED_BYTES // 16:
            return None
        self._reported = self._processed
        return self._processed
