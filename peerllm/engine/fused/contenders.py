"""Which tokens of a row may survive top-k and top-p: a list of them, and how they are spread over bins of scores.

`choice.best_of_blocks` has gone over the row before, and what it found bounds the threshold from below: what is not
under the bound contends, mostly a few hundred tokens. Counts and masses of the bins are sums of integers, so that the
order in which programs add to them, which is chance, changes nothing.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs

MASS_SCALE = tl.constexpr(float(1 << 44))
"""As `cutting.MASS_SCALE`."""
_MANTISSA_SHIFT = tl.constexpr(18)
"""Of float32's 23 bits of mantissa 5 are left: 32 bins for each doubling of the distance."""
_NEAREST = tl.constexpr((127 - 6) << 5)
"""Distances under 2**-6 share a bin; 512 bins on from there is 2**10."""


@triton.jit
def is_row_cut(slot, temperatures, top_ks, top_ps, vocabulary):
    """Whether the slot's sampling may cut a token off."""
    top_k = tl.load(top_ks + slot)
    has_k = (top_k > 0) & (top_k < vocabulary)
    return (tl.load(temperatures + slot) > 0.0) & (has_k | (tl.load(top_ps + slot) < 1.0))


@triton.jit
def ordered(score):
    """int32 in the order of float32 `score`; both zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def middle_of(low, high):
    """The mean of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def mass_of(score, top):
    """int64: exp(score - top), of which `top` has `MASS_SCALE`."""
    return (tl.exp(score - top) * MASS_SCALE).to(tl.int64)


@triton.jit
def bin_of(score, pivot, BINS: tl.constexpr):
    """int32 from 0, the highest scores' bin, to `BINS` - 1. Bins are the narrower the nearer they are to `pivot`."""
    away = score - pivot
    steps = ((away.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> _MANTISSA_SHIFT) - _NEAREST
    steps = tl.minimum(tl.maximum(steps, 0), BINS // 2 - 1)
    return tl.where(away < 0.0, BINS // 2 + steps, BINS // 2 - 1 - steps)


@triton.jit
def place_of(at, BINS: tl.constexpr):
    """Where the sums of the bin `at` are: neighbours', which are added to at the same time, in different lines."""
    return at * 37 & (BINS - 1)


@triton.jit
def _kth_largest(score, k):
    """The k-th largest of `score`, which has k or more; float32."""
    key = ordered(score)
    low = tl.min(key, axis=0)
    high = tl.max(key, axis=0)
    while low < high:
        middle = middle_of(low, high)
        is_enough = tl.sum((key > middle).to(tl.int32), axis=0) < k
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return tl.min(tl.where(key >= low, score, float("inf")), axis=0)


@triton.jit(do_not_specialize=["rows_per_sequence"])
def list_contenders(
    logits,  # [rows, STRIDE]
    slots,  # int32 [batch]
    temperatures,  # float32 [slots]
    top_ks,  # int32 [slots]; 0 is off
    top_ps,  # float32 [slots]; 1 is off
    largest,  # float32 [rows, BLOCKS]: of the scores, from best_of_blocks
    mass,  # float32 [rows, BLOCKS]: sum of exp(. - largest)
    counts,  # int32 [rows, 2]: 0, then how many contend, also of those that the list has no room for; and one of `cut`
    bins,  # int64 [rows, 2, BINS]: 0, then how many of each bin contend, and their mass, at `place_of` it
    marks,  # float32 [rows, 2]: the least score that contends, and the bins' pivot
    listed,  # float32 [rows, CAPACITY]: their scores
    listed_columns,  # int32 [rows, CAPACITY]
    vocabulary,
    rows_per_sequence,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of one program
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(1)
    slot = tl.load(slots + row // rows_per_sequence)
    if is_row_cut(slot, temperatures, top_ks, top_ps, vocabulary):
        offs = tl.arange(0, PADDED)
        is_block = offs < BLOCKS
        limits = tl.load(largest + row * BLOCKS + offs, mask=is_block, other=float("-inf"))
        top = tl.max(limits, axis=0)
        top_k = tl.load(top_ks + slot)
        bound = float("-inf")
        if (top_k > 0) & (top_k < vocabulary):
            # There are k tokens of at least the k-th largest block's best.
            if top_k <= BLOCKS:
                bound = _kth_largest(limits, top_k)
        else:
            # All tokens under it together have less than the 1 - p that may be cut off; a hundredth for rounding.
            of_block = tl.load(mass + row * BLOCKS + offs, mask=is_block, other=0.0)
            total = tl.sum(of_block * tl.exp(limits - top), axis=0)
            bound = top + tl.log(total * (1.0 - tl.load(top_ps + slot)) / vocabulary) - 0.01
        # The mean of the blocks' best is where a flat row grows dense, and a peaked one's peaks are far from it.
        is_finite = (limits > float("-inf")) & (limits < float("inf"))
        pivot = tl.sum(tl.where(is_finite, limits, 0.0), axis=0) / tl.maximum(tl.sum(is_finite.to(tl.int32), axis=0), 1)
        if tl.program_id(0) == 0:
            tl.store(marks + row * 2, bound)
            tl.store(marks + row * 2 + 1, pivot)
        temperature = tl.load(temperatures + slot)
        logits += row.to(tl.int64) * STRIDE
        listed += row * CAPACITY
        listed_columns += row * CAPACITY
        bins += row * 2 * BINS
        for tile in range(TILES):
            column = (tl.program_id(0) * TILES + tile) * TILE + tl.arange(0, TILE)
            is_column = column < vocabulary
            raw = tl.load(logits + column, mask=is_column, other=float("-inf")).to(tl.float32)
            score = tl.div_rn(raw, temperature)
            contends = is_column & (score >= bound)
            one = contends.to(tl.int32)
            place = tl.atomic_add(counts + row * 2, tl.sum(one, axis=0), sem="relaxed") + tl.cumsum(one, axis=0) - one
            has_room = contends & (place < CAPACITY)
            tl.store(listed + place, score, mask=has_room)
            tl.store(listed_columns + place, column, mask=has_room)
            sums = bins + place_of(bin_of(score, pivot, BINS), BINS)
            tl.atomic_add(sums, one.to(tl.int64), mask=contends, sem="relaxed")
            tl.atomic_add(sums + BINS, mass_of(score, top), mask=contends, sem="relaxed")
