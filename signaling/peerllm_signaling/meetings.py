"""Where peers that know each other meet again: at 256 bits that only the two can compute. No I/O, no clock.

Each end comes with a side (0 or 1, by their keys) and with the identifiers of yesterday, today and tomorrow. A newer
line on the same side evicts the older: so a peer that comes back displaces its own ghost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peerllm_signaling import limits
from peerllm_signaling.budgets import Bucket
from peerllm_signaling.line import EVICTED, Line, Refused, say


@dataclass(slots=True, eq=False)
class End:
    """One line at a rendezvous."""

    line: Line
    side: int
    ids: tuple[bytes, ...]
    partner: End | None = None
    budget: Bucket | None = None
    """The pair's, shared by both ends."""


class Meetings:
    """`greet(end)` is called for each end of a new pair: it tells them, with what else the server has for pairs."""

    def __init__(self, greet: Callable[[End], None]) -> None:
        self._greet = greet
        self._table: dict[bytes, list[End | None]] = {}
        self._ends = 0

    def __len__(self) -> int:
        return self._ends

    def meet(self, line: Line, old: End | None, side: int, ids: tuple[bytes, ...], now: float) -> End:
        """Takes a place at each identifier; `old` is the same line's earlier place, if it had one.

        Raises:
            Refused: the server is full.
        """
        if old is not None:
            self._remove(old)
        elif self._ends >= limits.MAX_MEETINGS:
            raise Refused("server_full")
        end = End(line, side, ids)
        self._ends += 1
        partner: End | None = None
        for each in ids:
            places = self._table.setdefault(each, [None, None])
            ghost = places[side]
            if ghost is not None:
                self._evict(ghost)
                places = self._table.setdefault(each, [None, None])
            places[side] = end
            partner = partner or places[1 - side]
        if partner is not None:
            self._pair(end, partner, now)
        return end

    def _pair(self, end: End, partner: End, now: float) -> None:
        if partner.partner is not None:
            self._evict(partner.partner)
        budget = partner.budget or Bucket(limits.PAIR_MESSAGES_PER_MINUTE, limits.PAIR_MESSAGES_BURST, now)
        end.partner, partner.partner = partner, end
        end.budget = partner.budget = budget
        self._greet(end)
        self._greet(partner)

    def relay(self, end: End, body: bytes, now: float) -> None:
        """To the other end, or a word that it is not there."""
        if end.partner is None:
            say(end.line, "away")
            return
        if end.budget is not None and not end.budget.take(now):
            raise Refused("too_many")
        end.partner.line.send(body)

    def leave(self, end: End) -> None:
        self._remove(end)

    def _evict(self, end: End) -> None:
        self._remove(end)
        say(end.line, "evicted")
        end.line.drop(EVICTED, "a newer connection of the same peer")

    def _remove(self, end: End) -> None:
        for each in end.ids:
            places = self._table.get(each)
            if places is None or places[end.side] is not end:
                continue
            places[end.side] = None
            if places == [None, None]:
                del self._table[each]
        if end.ids:
            self._ends -= 1
            end.ids = ()
        partner, end.partner = end.partner, None
        if partner is not None:
            partner.partner = None
            say(partner.line, "away")
