"""A slice over several devices of one machine: parts of its layers one after the other, each with its own cache.

Looks like one slice with one cache and one runner to the engine. Hidden states go from device to device; where a part
ends nothing else crosses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from peerllm.engine.cache import KvCache
from peerllm.engine.runner import Runner
from peerllm.engine.slice import ModelSlice, SliceShape
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling


class SliceChain:
    """Parts in order, each on its device with its weights; `ModelSlice`'s properties, of the whole."""

    def __init__(self, parts: Sequence[ModelSlice]) -> None:
        self.parts = list(parts)
        first, last = self.parts[0], self.parts[-1]
        self.shape: SliceShape = first.shape
        self.range = LayerRange(first.range.first, last.range.last)
        self.is_first, self.is_last = first.is_first, last.is_last

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def byte_count(self) -> int:
        return sum(part.byte_count for part in self.parts)

    def prepare(self, positions: int) -> None:
        for part in self.parts:
            part.prepare(positions)

    def make_cache(self, *, slots: int, capacity: int) -> CacheChain:
        return CacheChain([part.make_cache(slots=slots, capacity=capacity) for part in self.parts])

    def inputs_of(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.parts[0].inputs_of(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parts[-1].logits(hidden)


class CacheChain:
    """Caches of the same slots and lengths on several devices; what the engine asks of a `KvCache`."""

    def __init__(self, caches: Sequence[KvCache]) -> None:
        self.caches = list(caches)
        self.slots = self.caches[0].slots

    @property
    def lengths(self) -> list[int]:
        return self.caches[0].lengths

    @property
    def byte_count(self) -> int:
        return sum(cache.byte_count for cache in self.caches)

    def rewind(self, slot: int, length: int) -> None:
        """As `KvCache.rewind`."""
        for cache in self.caches:
            cache.rewind(slot, length)

    def advance(self, slots: list[int], rows: int) -> None:
        for cache in self.caches:
            cache.advance(slots, rows)


class ChainRunner:
    """Runs a block through the parts' runners, one after the other. A `runner.Runner`."""

    def __init__(self, runners: Sequence[Runner], devices: Sequence[torch.device]) -> None:
        self._runners = list(runners)
        self._devices = list(devices)

    @property
    def verdict_us(self) -> int:
        return self._runners[-1].verdict_us

    @verdict_us.setter
    def verdict_us(self, value: int) -> None:
        self._runners[-1].verdict_us = value

    def open(self, slot: int, sampling: Sampling) -> None:
        for runner in self._runners:
            runner.open(slot, sampling)

    def forward(self, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        return self._through(slot, inputs, len(self._runners))

    def verify(
        self, slot: int, inputs: torch.Tensor, candidates: list[int], start: int, sampling: Sampling
    ) -> tuple[int, int]:
        hidden = self._through(slot, inputs, len(self._runners) - 1)
        return self._runners[-1].verify(slot, hidden.to(self._devices[-1]), candidates, start, sampling)

    def _through(self, slot: int, hidden: torch.Tensor, count: int) -> torch.Tensor:
        for runner, device in itertools.islice(zip(self._runners, self._devices, strict=True), count):
            hidden = runner.forward(slot, hidden.to(device))
        return hidden


AnySlice = ModelSlice | SliceChain
AnyCache = KvCache | CacheChain
