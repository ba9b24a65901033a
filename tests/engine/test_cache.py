"""Positions, slots and stale rows of the key-value cache."""

import pytest
import torch

from peerllm.engine.cache import KvCache
from peerllm.protocol.errors import ContextTooLong


def _cache(slots: int = 3, capacity: int = 16) -> KvCache:
    return KvCache(layers=2, slots=slots, heads=2, capacity=capacity, head_dim=4, dtype=torch.float32)


def _write(cache: KvCache, slots: list[int], rows: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    view = cache.view(slots, rows)
    block = torch.full((len(slots), 2, rows, 4), value)
    out = view.update(block, -block, 1)
    cache.advance(slots, rows)
    return out


def test_rows_are_written_at_the_slots_position():
    cache = _cache()
    _write(cache, [1], 3, 1.0)
    keys, values = _write(cache, [1], 2, 2.0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2]
    assert values[0, 1, :, 3].tolist() == [-1, -1, -1, -2, -2]
    assert cache.positions.tolist() == cache.lengths == [0, 5, 0]


def test_after_a_rewind_the_old_rows_are_not_seen():
    cache = _cache()
    _write(cache, [0], 6, 1.0)
    cache.rewind(0, 2)
    keys, _ = _write(cache, [0], 1, 3.0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 3]
    assert cache.positions.tolist()[0] == 3


def test_a_row_may_look_at_itself_and_at_what_is_before_it():
    cache = _cache()
    _write(cache, [0], 2, 1.0)
    mask = cache.view([0], 3).mask
    assert mask.shape == (1, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_slots_of_different_lengths_go_in_one_batch():
    cache = _cache()
    _write(cache, [0], 4, 1.0)
    _write(cache, [2], 1, 2.0)
    view = cache.view([0, 2], 2)
    assert view.positions.tolist() == [[4, 5], [1, 2]]
    assert view.mask[1, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    keys, _ = _write(cache, [0, 2], 2, 7.0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 1, 7, 7]
    assert keys[1, 0, :3, 0].tolist() == [2, 7, 7]
    assert cache.lengths == [6, 0, 3]


def test_a_rewind_never_goes_forward():
    cache = _cache()
    _write(cache, [0], 2, 1.0)
    for length in (3, -1):
        with pytest.raises(ContextTooLong):
            cache.rewind(0, length)


def test_overflow_is_an_error_on_the_host_and_writes_nothing():
    cache = _cache(capacity=4)
    _write(cache, [0], 4, 1.0)
    with pytest.raises(ContextTooLong):
        cache.view([0], 1)
    assert cache.lengths == [4, 0, 0]
