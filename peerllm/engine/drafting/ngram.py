"""Prompt look-up: what followed the last few tokens when they stood in this sequence before (Saxena, 2023)."""

from __future__ import annotations

from peerllm.engine.drafting.base import Proposal, shared_prefix
from peerllm.protocol.requests import Sampling

LONGEST = 4
SHORTEST = 1
_PRIOR_RIGHT, _PRIOR_TRIED = 1.0, 2.0


class NgramDrafter:
    """Looks for the longest of the last `LONGEST` … `SHORTEST` tokens and proposes what followed its latest place.

    The probability of a candidate is the share of such candidates that were right so far, by the length of the match.
    """

    byte_count = 0

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}
        self._right = [_PRIOR_RIGHT] * (LONGEST + 1)
        self._tried = [_PRIOR_TRIED] * (LONGEST + 1)
        self._proposed: dict[int, tuple[int, int, list[int]]] = {}

    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        self._learn(slot, tokens)
        index = self._indexes.setdefault(slot, _Index())
        index.extend(tokens)
        length, follows = index.find(tokens)
        probability = self._right[length] / self._tried[length]
        if limit <= 0 or follows is None or probability < min_probability:
            return Proposal([], [])
        candidates = tokens[follows : follows + limit]
        self._proposed[slot] = len(tokens), length, candidates
        return Proposal(candidates, [probability] * len(candidates))

    def forget(self, slot: int) -> None:
        self._indexes.pop(slot, None)
        self._proposed.pop(slot, None)

    def _learn(self, slot: int, tokens: list[int]) -> None:
        start, length, candidates = self._proposed.pop(slot, (0, 0, []))
        if not candidates or len(tokens) <= start:
            return
        right = shared_prefix(candidates, tokens[start:])
        self._right[length] += right
        self._tried[length] += min(right + 1, len(candidates))


class _Index:
    """For each run of tokens, the place after its latest occurrence that has something after it."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._tokens: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        kept = shared_prefix(self._tokens, tokens)
        if kept < len(self._tokens):
            # Committed tokens changed, as after a replay: places in the index may be wrong.
            self._after.clear()
            kept = 0
        # A run that ends with the last token has nothing after it yet: it enters with the next token.
        for end in range(max(kept, 1), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._tokens = list(tokens)

    def find(self, tokens: list[int]) -> tuple[int, int | None]:
        for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                return length, place
        return 0, None
