"""A slice's layers by transformers' own modules on static buffers: what graphs capture where Triton is not.

The same interface as `fused.layers.FusedSlice`. A graph of it holds one slot: reaching a slot through an index would
copy its whole cache.
"""

from __future__ import annotations

from typing import Any

import torch

from peerllm.engine.cache import KvCache
from peerllm.engine.slice import ModelSlice


class StaticView:
    """One slot's cache for a block whose position is read on the device; has `CacheView`'s attributes."""

    has_stale_keys = True

    def __init__(self, cache: KvCache, slot: int, rows: int) -> None:
        self._keys = cache.keys[:, slot]
        self._values = cache.values[:, slot]
        device = cache.keys.device
        # Padding may reach beyond the end; it then shares the last row, which no token stands in.
        self._at = (cache.positions[slot] + torch.arange(rows, device=device)).clamp_(max=cache.capacity - 1)
        self.positions = self._at[None]
        columns = torch.arange(cache.capacity, device=device)
        self.mask = (columns[None, :] <= self._at[:, None])[None, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys[layer].index_copy_(1, self._at, key[0])
        self._values[layer].index_copy_(1, self._at, value[0])
        return self._keys[layer][None], self._values[layer][None]


class ModuleSlice:
    """`part`'s layers over `cache`, one sequence of at most `max_rows` rows."""

    is_bound_to_slot = True
    is_dependent = False

    def __init__(self, part: ModelSlice, cache: KvCache, *, max_rows: int) -> None:
        self.part = part
        self.cache = cache
        # A masked value still meets a weight of zero, and zero times what memory happens to hold may be NaN.
        cache.values.zero_()
        self.slot = 0
        """The slot that the next `forward` (and so the next capture) is for."""
        self.slots = torch.zeros(1, dtype=torch.int32, device=part.device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=part.device)
        self.hidden = torch.zeros(max_rows, part.shape.width, dtype=part.dtype, device=part.device)
        self.source = torch.zeros_like(self.hidden)

    def forward(self, rows_each: int, batch: int = 1) -> torch.Tensor:
        view: Any = StaticView(self.cache, self.slot, rows_each)
        inputs = self.tokens[:rows_each] if self.part.takes_tokens else self.source[:rows_each]
        self.hidden[:rows_each] = self.part(inputs[None], view)[0]
        return self.hidden[:rows_each]

    def logits(self, count: int, out: torch.Tensor) -> torch.Tensor:
        out[:count] = self.part.logits(self.hidden[:count])
        return out[:count]
