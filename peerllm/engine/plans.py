"""Plans of devices' memory: what they say, the largest context that fits, and how layers are divided among devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange, share_layers

_MIB = limits.MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes on one device."""

    weights: int
    cache_per_position: int
    context: int
    slots: int
    workspace: int
    draft: int
    """Everything of a draft model on the same device."""
    free: int
    """0 where it is not known."""
    is_for_draft: bool = False
    """Whether all of it is a draft model's, alone on its device."""

    @property
    def cache(self) -> int:
        return self.cache_per_position * cache_positions(self.context) * self.slots

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.draft

    @property
    def fits(self) -> bool:
        return self.free == 0 or self.total <= self.free

    def words(self) -> str:
        cache = f"keys and values of {self.context} positions"
        parts = {"weights": self.weights, cache: self.cache, "workspace": self.workspace}
        if self.draft:
            parts["draft model"] = self.draft
        listed = ", ".join(f"{name} {size // _MIB} MiB" for name, size in parts.items())
        what = " for the draft model" if self.is_for_draft else ""
        return f"{self.total // _MIB} MiB are needed{what} ({listed}); {self.free // _MIB} MiB are free"


Plans = list[tuple[torch.device, Plan]]
PlansAt = Callable[[list[LayerRange], int], Plans]
"""Of a division of the layers and so many positions."""


def cache_positions(context: int) -> int:
    """Of a sequence's cache: graphs pad blocks to a bucket, and what they write past the end must still be inside."""
    return context + limits.MAX_CANDIDATES + 1


def largest_context(plans_at: Callable[[int], Plans], most: int) -> int:
    """The largest context up to `most` whose plans fit; 0 where not even one position does."""
    fits, too_large = 0, most + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if fit(plans_at(middle)):
            fits = middle
        else:
            too_large = middle
    return fits


def fit(plans: Plans) -> bool:
    return all(plan.fits for _, plan in plans)


def split_range(layers: LayerRange, free_bytes: Sequence[int]) -> list[LayerRange]:
    """`layers` over devices with so much free memory, in order; a device too many gets none."""
    count = min(len(layers), len(free_bytes))
    shares = share_layers(len(layers), [None] * count, list(free_bytes[:count]))
    return [LayerRange(layers.first + each.first, layers.first + each.last) for each in shares]


def best_division(ranges: list[LayerRange], wanted: int, plans_at: PlansAt) -> tuple[int, list[LayerRange]]:
    """The largest context up to `wanted` that fits, and the division of `ranges`' layers for it. A draft, a head or
    another's use of a device can make it another one than free memory alone says."""
    largest, best, positions = -1, ranges, wanted
    while largest < wanted:
        ranges = _with_most_room(best, positions, plans_at)
        found = largest_context(partial(plans_at, ranges), wanted)
        if found <= largest:
            break
        largest, best, positions = found, ranges, min(found + 1, wanted)
    return largest, best


def _with_most_room(ranges: list[LayerRange], positions: int, plans_at: PlansAt) -> list[LayerRange]:
    """The division whose fullest device has the most to spare at so many positions, a neighbour at a time."""
    room = _room(plans_at(ranges, positions))
    while True:
        found = [(_room(plans_at(each, positions)), each) for each in _neighbours(ranges)]
        most, best = max(found, key=lambda each: each[0], default=(room, ranges))
        if most <= room:
            return ranges
        room, ranges = most, best


def _room(plans: Plans) -> list[float]:
    """Bytes that each device has to spare, the fewest first."""
    return sorted(plan.free - plan.total if plan.free else math.inf for _, plan in plans)


def _neighbours(ranges: list[LayerRange]) -> Iterator[list[LayerRange]]:
    """Divisions with one border, or several beside each other, a layer further on or back."""
    borders = [each.last for each in ranges[:-1]]
    for first, last in itertools.combinations(range(len(borders) + 1), 2):
        for step in (-1, 1):
            moved = [at + step if first <= index < last else at for index, at in enumerate(borders)]
            edges = [ranges[0].first, *moved, ranges[-1].last]
            if all(before < after for before, after in itertools.pairwise(edges)):
                yield [LayerRange(*each) for each in itertools.pairwise(edges)]
