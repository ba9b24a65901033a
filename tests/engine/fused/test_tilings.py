"""How products are cut up: what the kernels and their buffers rely on."""

from __future__ import annotations

import pytest

from peerllm.engine import bench_int8
from peerllm.engine.fused.tilings import (
    INT8_PARTS,
    TILINGS,
    TILINGS_INT8,
    Tiling,
    default_tiling,
    int8_tiling,
    parts_for,
)
from peerllm.engine.shapes import NAMES, named_config
from peerllm.engine.slice import SliceShape


@pytest.mark.parametrize("name", NAMES)
def test_an_int8_product_of_any_size_of_block_is_cut_evenly_and_into_few_parts(name):
    for product in bench_int8.products(SliceShape.of(named_config(name))):
        for tile in (16, 32, 64, 128):
            tiling = int8_tiling(product.columns, product.depth, tile, is_gated=product.is_gated)
            assert product.depth % tiling.block_k == 0
            assert 1 <= tiling.parts <= (1 if product.is_gated else INT8_PARTS)


def test_narrow_matrices_are_cut_in_depth_until_there_are_programs_enough():
    assert parts_for(3584, 18944, 128, 256) == INT8_PARTS
    assert parts_for(152064, 3584, 64, 256) == 1
    assert parts_for(896, 896, 64, 256) == 1  # a part shallower than 512 is not worth its sum


def test_a_head_that_is_cut_or_padded_otherwise_is_tiled_as_the_measured_one_of_its_depth():
    measured = TILINGS[151936, 896, False]
    assert measured != default_tiling(16384, 896, is_gated=False)
    for columns in (151665, 151680, 152064):
        assert default_tiling(columns, 896, is_gated=False) == measured
    assert default_tiling(151680, 3584, is_gated=False) == TILINGS[152064, 3584, False]
    for columns, depth in ((128256, 896), (151680, 1024), (160000, 896)):
        assert default_tiling(columns, depth, is_gated=False) != measured
    # Near in columns is enough for heads alone.
    assert default_tiling(1160, 896, is_gated=False) != TILINGS[1152, 896, False]


def test_what_is_tried_holds_what_is_used_now_and_nothing_twice():
    shape = SliceShape.of(named_config("qwen2.5-7b"))
    for product in bench_int8.products(shape):
        for tile in (16, 128):
            tried = list(bench_int8.candidates(product, tile))
            assert len(tried) == len(set(tried)) >= 5
            assert int8_tiling(product.columns, product.depth, tile, is_gated=product.is_gated) in tried
            assert all(product.depth % each.block_k == 0 and each.parts <= INT8_PARTS for each in tried)


def test_a_tile_fits_the_shared_memory_of_smaller_gpus_and_is_left_alone_where_it_fits():
    small, hopper = 99 << 10, 227 << 10
    wide = int8_tiling(3584, 18944, 128, is_gated=False)
    fitted = wide.fitted(2 * 128 + wide.block_n, small)
    assert fitted.stages * fitted.block_k * (2 * 128 + wide.block_n) <= small
    assert (fitted.block_n, fitted.parts) == (wide.block_n, wide.parts)
    for (_, _, is_gated), tiling in TILINGS.items():
        assert tiling.fitted(2 * 16 + 2 * tiling.block_n * (2 if is_gated else 1), hopper) == tiling
    for (_, _, is_gated, rows), tiling in TILINGS_INT8.items():
        assert tiling.fitted(2 * rows + tiling.block_n * (2 if is_gated else 1), hopper) == tiling
    assert Tiling(64, 128, 4, 8).fitted(1 << 20, small) == Tiling(64, 32, 4, 2)
