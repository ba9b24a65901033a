"""The key-value cache: sessions in slots, positions on the device, rewind by moving a position.

Keys and values are each one tensor `[layer, slot, head, position, dim]`. Rows at or past a slot's position are stale:
they are masked, never cleared, and may hold anything. What a forward may not read is either not part of the tensors
that it gets (one slot, eager) or replaced by -inf after the product (several slots, graphs), so that a stale NaN in a
key or a huge stale value changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from peerllm.protocol.errors import ContextTooLong


class KvCache:
    """Keys and values of `layers` layers for `slots` sessions of at most `capacity` rows each.

    `positions` (int64 `[slots]`, on the device) is what graphs read; `lengths` is the host's copy, on which overflow
    is checked, because on CUDA an index beyond the end is a device-side assert that ends the process.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, slots, heads, capacity, head_dim)
        # On a GPU stale values are multiplied by a weight of zero, so they have to begin finite.
        make = torch.zeros if torch.device(device).type != "cpu" else torch.empty
        self.keys = make(shape, dtype=dtype, device=device)
        self.values = make(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = [0] * slots
        self.slots = slots
        self.capacity = capacity

    @property
    def byte_count(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def rewind(self, slot: int, length: int) -> None:
        """Keeps the first `length` rows of `slot`.

        Raises:
            ContextTooLong: the slot holds fewer rows; a rewind never goes forward.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ContextTooLong(f"the cache holds {self.lengths[slot]} rows; row {length} cannot be the next")
        self._set(slot, length)

    def view(self, slots: list[int], rows: int) -> CacheView:
        """What a forward of `rows` rows for each of `slots` writes to and reads from.

        Raises:
            ContextTooLong: the rows do not fit.
        """
        for slot in slots:
            if self.lengths[slot] + rows > self.capacity:
                raise ContextTooLong(
                    f"{self.lengths[slot]} rows and {rows} more do not fit a context of {self.capacity}"
                )
        return CacheView(self, slots, rows)

    def advance(self, slots: list[int], rows: int) -> None:
        """The rows of a forward are taken in."""
        for slot in slots:
            self._set(slot, self.lengths[slot] + rows)

    def _set(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.positions[slot] = length


class CacheView:
    """One forward's cache, handed to transformers' layers in place of their own.

    Attributes:
        positions: int64 `[batch, rows]`, absolute.
        mask: bool `[batch, 1, rows, length]`, true where a row may look.
        has_stale_keys: whether `length` reaches beyond some slot's rows.
    """

    def __init__(self, cache: KvCache, slots: list[int], rows: int) -> None:
        device = cache.keys.device
        self._cache = cache
        self._slots = slots
        starts = [cache.lengths[slot] for slot in slots]
        self._start = starts[0]
        self._end = max(starts) + rows
        self._index = torch.tensor(slots, device=device)
        self.positions = cache.positions[self._index][:, None] + torch.arange(rows, device=device)
        columns = torch.arange(self._end, device=device)
        self.mask = (columns[None, None, :] <= self.positions[:, :, None])[:, None]
        self.has_stale_keys = len(slots) > 1

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `key` and `value` `[batch, head, rows, dim]`; gives all that the rows may look at,
        `[batch, head, length, dim]`. The signature is the one that transformers' attention calls."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if len(self._slots) == 1:
            slot = self._slots[0]
            keys[slot, :, self._start : self._end] = key[0]
            values[slot, :, self._start : self._end] = value[0]
            return keys[slot : slot + 1, :, : self._end], values[slot : slot + 1, :, : self._end]
        where = self._index[:, None], slice(None), self.positions
        keys[where] = key.transpose(1, 2)
        values[where] = value.transpose(1, 2)
        return keys[self._index, :, : self._end], values[self._index, :, : self._end]
