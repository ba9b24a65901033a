"""Top-k and top-p without a sort: the best of the tokens that they leave in a row.

`choice.best_of_blocks` has gone over the row before, and what it found bounds the threshold from below:
`list_contenders` lists what is not under the bound, mostly a few hundred tokens, and one program bisects over the list.
Scores are compared as integers in the same order; counts and masses are sums of integers, so that the list's order,
which is chance, changes nothing, and a row is cut in the same way alone and in any block. A list that has no room for a
row (a flat one) is not used: the row's program then goes over the whole vocabulary.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs
from peerllm.engine.fused.noise import perturb

_MASS_SCALE = tl.constexpr(float(1 << 44))
"""As `cutting.MASS_SCALE`."""
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def is_row_cut(slot, temperatures, top_ks, top_ps, vocabulary):
    """Whether the slot's sampling may cut a token off."""
    top_k = tl.load(top_ks + slot)
    has_k = (top_k > 0) & (top_k < vocabulary)
    return (tl.load(temperatures + slot) > 0.0) & (has_k | (tl.load(top_ps + slot) < 1.0))


@triton.jit
def _ordered(score):
    """int32 in the order of float32 `score`; both zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """The mean of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kth_largest(score, k):
    """The k-th largest of `score`, which has k or more; float32."""
    key = _ordered(score)
    low = tl.min(key, axis=0)
    high = tl.max(key, axis=0)
    while low < high:
        middle = _middle(low, high)
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
    counts,  # int32 [rows]: 0, then how many contend, also of those that the list has no room for
    listed,  # float32 [rows, CAPACITY]: their scores
    listed_columns,  # int32 [rows, CAPACITY]
    vocabulary,
    rows_per_sequence,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of one program
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
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
        top_k = tl.load(top_ks + slot)
        bound = float("-inf")
        if (top_k > 0) & (top_k < vocabulary):
            # There are k tokens of at least the k-th largest block's best.
            if top_k <= BLOCKS:
                bound = _kth_largest(limits, top_k)
        else:
            # All tokens under it together have less than the 1 - p that may be cut off; a hundredth for rounding.
            top = tl.max(limits, axis=0)
            sums = tl.load(mass + row * BLOCKS + offs, mask=is_block, other=0.0)
            total = tl.sum(sums * tl.exp(limits - top), axis=0)
            bound = top + tl.log(total * (1.0 - tl.load(top_ps + slot)) / vocabulary) - 0.01
        temperature = tl.load(temperatures + slot)
        logits += row.to(tl.int64) * STRIDE
        listed += row * CAPACITY
        listed_columns += row * CAPACITY
        for tile in range(TILES):
            column = (tl.program_id(0) * TILES + tile) * TILE + tl.arange(0, TILE)
            is_column = column < vocabulary
            raw = tl.load(logits + column, mask=is_column, other=float("-inf")).to(tl.float32)
            score = tl.div_rn(raw, temperature)
            contends = is_column & (score >= bound)
            one = contends.to(tl.int32)
            place = tl.atomic_add(counts + row, tl.sum(one, axis=0)) + tl.cumsum(one, axis=0) - one
            has_room = contends & (place < CAPACITY)
            tl.store(listed + place, score, mask=has_room)
            tl.store(listed_columns + place, column, mask=has_room)


@triton.jit
def _scores(start, count, is_listed, listed, logits, temperature, TILE: tl.constexpr):
    """float32 `[TILE]`: the row's scores from `start` on, of the list or of all."""
    offs = start + tl.arange(0, TILE)
    score = tl.full([TILE], float("-inf"), tl.float32)
    if is_listed:
        score = tl.load(listed + offs, mask=offs < count, other=float("-inf"))
    else:
        raw = tl.load(logits + offs, mask=offs < count, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(raw, temperature)
    return score


@triton.jit
def _mass_of(score, top):
    return (tl.exp(score - top) * _MASS_SCALE).to(tl.int64)


@triton.jit
def _count_above(key, count, is_listed, listed, logits, temperature, TILE: tl.constexpr):
    found = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        found += (_ordered(score) > key).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass_above(key, top, count, is_listed, listed, logits, temperature, TILE: tl.constexpr):
    found = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        found += tl.where(_ordered(score) > key, _mass_of(score, top), 0)
    return tl.sum(found, axis=0)


@triton.jit
def best_of_survivors(
    top, total,  # of the row: its largest score, and the sum of exp(score - top)
    row, slot, place, counts, listed, listed_columns, logits,
    positions, seeds, temperatures, top_ks, top_ps, ids, vocabulary,
    STRIDE: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """(the column that the row chooses, the survivors' sum of exp(score - top)) of a row that is cut.

    The column is `_NO_TOKEN` where logits are not finite, and may be then.
    """
    listed += row * CAPACITY
    listed_columns += row * CAPACITY
    logits += row.to(tl.int64) * STRIDE
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    count = tl.load(counts + row)
    is_listed = count <= CAPACITY
    count = tl.where(is_listed, count, vocabulary)
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        inside = start + tl.arange(0, TILE) < count
        least = tl.where(inside, tl.minimum(least, score), least)
    best_key = _ordered(top)
    # The smallest key with too few above it; the best token's own has none above.
    key = tl.minimum(_ordered(tl.min(least, axis=0)), best_key)
    wanted = total * top_p * _MASS_SCALE
    if (top_k > 0) & (top_k < vocabulary):
        high = best_key
        while key < high:
            middle = _middle(key, high)
            is_enough = _count_above(middle, count, is_listed, listed, logits, temperature, TILE) < top_k
            key = tl.where(is_enough, key, middle + 1)
            high = tl.where(is_enough, middle, high)
        left = _mass_above(key - 1, top, count, is_listed, listed, logits, temperature, TILE)
        wanted = left.to(tl.float32) * top_p
    if top_p < 1.0:
        enough = wanted.to(tl.int64)
        high = best_key
        while key < high:
            middle = _middle(key, high)
            is_enough = _mass_above(middle, top, count, is_listed, listed, logits, temperature, TILE) < enough
            key = tl.where(is_enough, key, middle + 1)
            high = tl.where(is_enough, middle, high)

    best = float("-inf")
    winner = _NO_TOKEN
    kept = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        offs = start + tl.arange(0, TILE)
        survives = (offs < count) & (_ordered(score) >= key)
        # Noise is the most of the work, and most tiles of a whole row have no survivor.
        if tl.max(survives.to(tl.int32), axis=0) > 0:
            kept += tl.where(survives, _mass_of(score, top), 0)
            column = offs
            if is_listed:
                column = tl.load(listed_columns + offs, mask=offs < count, other=0)
            noisy = perturb(score, column, survives, place, slot, positions, seeds, ids, HAS_IDS)
            noisy = tl.where(survives, noisy, float("-inf"))
            here = tl.max(noisy, axis=0)
            first = tl.min(tl.where(survives & (noisy == here), column, _NO_TOKEN), axis=0)
            winner = tl.where(here > best, first, tl.where(here == best, tl.minimum(first, winner), winner))
            best = tl.maximum(best, here)
    return winner, tl.sum(kept, axis=0).to(tl.float32) / _MASS_SCALE
