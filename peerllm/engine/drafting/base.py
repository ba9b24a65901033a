"""The one interface of all drafters. The text never depends on what a drafter says, only the speed does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from peerllm.protocol.requests import Sampling


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates in order, and how likely the drafter holds each to be right, given that those before it are."""

    candidates: list[int]
    probabilities: list[float]


class Drafter(Protocol):
    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        """At most `limit` candidates after `tokens`, the sequence in `slot` so far.

        A drafter stops before the first candidate that it holds less likely than `min_probability`. What it keeps of
        a slot from earlier rounds is its own affair: `tokens` may have lost candidates that it proposed.
        """
        ...

    def forget(self, slot: int) -> None:
        """Another sequence begins in `slot`."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of weights and caches on its device."""
        ...


class NoDrafter:
    """Plain decoding: every block is one row."""

    byte_count = 0

    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        return Proposal([], [])

    def forget(self, slot: int) -> None:
        pass


def shared_prefix(first: list[int], second: list[int]) -> int:
    """The length of the longest common prefix. Slices compare at C's speed, and the usual case is one comparison."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
