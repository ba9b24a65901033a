"""Top-k and top-p without a sort: the best of the tokens that they leave in a row.

The bins that `contenders.list_contenders` has filled say in which of them the threshold lies, and what is above it; one
program bisects over that bin's scores. They are in the list of contenders, or where it had no room for all of them (a
flat row) the row is gone over once to list them alone. Scores are compared as integers in the same order; counts and
masses are sums of integers, so that no order of summation changes anything, and a row is cut in the same way alone and
in any block. A bin that has no room in the list either (a row of equal scores) is bisected over the whole row.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.contenders import MASS_SCALE, bin_of, mass_of, middle_of, ordered, place_of
from peerllm.engine.fused.noise import perturb

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_LEAST_KEY = tl.constexpr(-0x7FFFFFFF)
"""Less than any score's; one less is still an int32."""


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
def _count_above(key, count, is_listed, listed, logits, temperature, TILE: tl.constexpr):
    found = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        found += (ordered(score) > key).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass_above(key, top, count, is_listed, listed, logits, temperature, TILE: tl.constexpr):
    found = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        found += tl.where(ordered(score) > key, mass_of(score, top), 0)
    return tl.sum(found, axis=0)


@triton.jit
def _bin_with(wanted, sums, BINS: tl.constexpr):
    """The bin in which the running sum of int64 `sums` `[BINS]` reaches `wanted`; `BINS` where it never does."""
    offs = tl.arange(0, BINS)
    return tl.min(tl.where(tl.cumsum(sums, axis=0) >= wanted, offs, BINS), axis=0)


@triton.jit
def _sum_before(at, sums, BINS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BINS) < at, sums, 0), axis=0)


@triton.jit
def _list_bins(
    first, last, bound, pivot, places, listed, listed_columns, logits, temperature, vocabulary,
    CAPACITY: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The list is now of the contenders that the bins `first` to `last` have in a whole row. `places` is a counter."""
    tl.store(places, 0)
    # What one thread has read before, others write, and what one writes here, others read after it.
    tl.debug_barrier()
    for start in range(0, vocabulary, TILE):
        column = start + tl.arange(0, TILE)
        score = _scores(start, vocabulary, False, listed, logits, temperature, TILE)
        at = bin_of(score, pivot, BINS)
        is_one = (column < vocabulary) & (score >= bound) & (at >= first) & (at <= last)
        # They are few, and their order is nothing: a counter is less work than a running sum of all.
        counter = places + tl.zeros([TILE], tl.int32)
        place = tl.atomic_add(counter, is_one.to(tl.int32), mask=is_one, sem="relaxed")
        tl.store(listed + place, score, mask=is_one & (place < CAPACITY))
        tl.store(listed_columns + place, column, mask=is_one & (place < CAPACITY))
    tl.debug_barrier()


@triton.jit
def _narrow(
    at, counted, masses, bound, pivot, places, listed, listed_columns, logits, temperature, vocabulary,
    CAPACITY: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists again, of a row that has not all its contenders in the list, those of the bin `at`.

    Returns whether the list still lacks some of those above the bin, whether it has the bin's, how many are to be gone
    over (of the list, or of the row), and how many and what mass are above them and not among them.
    """
    above = _sum_before(at, counted, BINS)
    here = _sum_before(at + 1, counted, BINS) - above
    is_partial = above + here > CAPACITY
    is_listed = here <= CAPACITY
    count = vocabulary
    mass = _sum_before(at, masses, BINS)
    if is_listed:
        first = tl.where(is_partial, at, 0)
        count = tl.where(is_partial, here, above + here).to(tl.int32)
        _list_bins(
            first, at, bound, pivot, places, listed, listed_columns, logits, temperature, vocabulary,
            CAPACITY, BINS, TILE,
        )  # fmt: skip
    is_apart = is_partial & is_listed
    return is_partial, is_listed, count, tl.where(is_apart, above, 0), tl.where(is_apart, mass, 0)


@triton.jit
def _keys_of(
    at, bound, pivot, count, is_listed, listed, logits, temperature, BINS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The least and the largest key of the contenders in the bin `at`."""
    low = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    high = tl.full([TILE], _LEAST_KEY, tl.int32)
    for start in range(0, count, TILE):
        score = _scores(start, count, is_listed, listed, logits, temperature, TILE)
        is_inside = (start + tl.arange(0, TILE) < count) & (score >= bound) & (bin_of(score, pivot, BINS) == at)
        key = ordered(score)
        low = tl.where(is_inside, tl.minimum(low, key), low)
        high = tl.where(is_inside, tl.maximum(high, key), high)
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _threshold(
    wanted, counted, masses, above, mass, is_partial, is_listed, count, bound, pivot, top, places,
    listed, listed_columns, logits, temperature, vocabulary,
    CAPACITY: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """The least key with fewer than `wanted` tokens above it, or less than that mass; and what `_narrow` returns, of
    the list as it is then."""
    at = _bin_with(wanted, masses if IS_MASS else counted, BINS)
    if is_partial:
        is_partial, is_listed, count, above, mass = _narrow(
            at, counted, masses, bound, pivot, places, listed, listed_columns, logits, temperature, vocabulary,
            CAPACITY, BINS, TILE,
        )  # fmt: skip
    key, high = _keys_of(at, bound, pivot, count, is_listed, listed, logits, temperature, BINS, TILE)
    while key < high:
        middle = middle_of(key, high)
        if IS_MASS:
            found = mass + _mass_above(middle, top, count, is_listed, listed, logits, temperature, TILE)
        else:
            found = above + _count_above(middle, count, is_listed, listed, logits, temperature, TILE)
        is_enough = found < wanted
        key = tl.where(is_enough, key, middle + 1)
        high = tl.where(is_enough, middle, high)
    return key, is_partial, is_listed, count, above, mass


@triton.jit
def _better(best, winner, score, column, survives, place, slot, positions, seeds, ids, HAS_IDS: tl.constexpr):
    """(`best`, `winner`), or the best score after noise of those that survive and its column where that is better."""
    noisy = perturb(score, column, survives, place, slot, positions, seeds, ids, HAS_IDS)
    noisy = tl.where(survives, noisy, float("-inf"))
    here = tl.max(noisy, axis=0)
    first = tl.min(tl.where(survives & (noisy == here), column, _NO_TOKEN), axis=0)
    winner = tl.where(here > best, first, tl.where(here == best, tl.minimum(first, winner), winner))
    return tl.maximum(best, here), winner


@triton.jit
def _best_listed(
    key, count, listed, listed_columns, place, slot, positions, seeds, ids, TILE: tl.constexpr, HAS_IDS: tl.constexpr
):
    """The column that is chosen where the list has all survivors."""
    best = float("-inf")
    winner = _NO_TOKEN
    for start in range(0, count, TILE):
        offs = start + tl.arange(0, TILE)
        score = tl.load(listed + offs, mask=offs < count, other=float("-inf"))
        survives = (offs < count) & (ordered(score) >= key)
        # Noise is the most of the work.
        if tl.max(survives.to(tl.int32), axis=0) > 0:
            column = tl.load(listed_columns + offs, mask=offs < count, other=0)
            best, winner = _better(
                best, winner, score, column, survives, place, slot, positions, seeds, ids, HAS_IDS
            )  # fmt: skip
    return winner


@triton.jit
def _best_by_blocks(
    key, best_of_block, token_of_block, logits, temperature, vocabulary, place, slot, positions, seeds, ids,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """The same without a list. A block's best is its survivors' best where it survives, and no less than it elsewhere:
    only blocks that might have a better one are gone over again, a tile at a time."""
    offs = tl.arange(0, PADDED)
    limit = tl.load(best_of_block + offs, mask=offs < BLOCKS, other=float("-inf"))
    token = tl.load(token_of_block + offs, mask=offs < BLOCKS, other=0)
    raw = tl.load(logits + token, mask=offs < BLOCKS, other=float("-inf")).to(tl.float32)
    survives = (offs < BLOCKS) & (ordered(tl.div_rn(raw, temperature)) >= key)
    best = tl.max(tl.where(survives, limit, float("-inf")), axis=0)
    winner = tl.min(tl.where(survives & (limit == best), token, _NO_TOKEN), axis=0)
    limit = tl.where(survives, float("-inf"), limit)
    most = tl.max(limit, axis=0)
    while (most >= best) & (most > float("-inf")):
        tile = tl.min(tl.where(limit == most, offs, PADDED), axis=0) * BLOCK // TILE
        column = tile * TILE + tl.arange(0, TILE)
        score = _scores(tile * TILE, vocabulary, False, logits, logits, temperature, TILE)
        remain = (column < vocabulary) & (ordered(score) >= key)
        best, winner = _better(best, winner, score, column, remain, place, slot, positions, seeds, ids, HAS_IDS)
        limit = tl.where(offs * BLOCK // TILE == tile, float("-inf"), limit)
        most = tl.max(limit, axis=0)
    return winner


@triton.jit
def best_of_survivors(
    top, total,  # of the row: its largest score, and the sum of exp(score - top)
    best_of_block, token_of_block,
    row, slot, place, counts, bins, marks, listed, listed_columns, logits,
    positions, seeds, temperatures, top_ks, top_ps, ids, vocabulary,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """(the column that the row chooses, the survivors' sum of exp(score - top)) of a row that is cut.

    The column is `_NO_TOKEN` where logits are not finite, and may be then.
    """
    listed += row * CAPACITY
    listed_columns += row * CAPACITY
    logits += row.to(tl.int64) * STRIDE
    bins += row * 2 * BINS
    counts += row * 2
    marks += row * 2
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    bound = tl.load(marks)
    pivot = tl.load(marks + 1)
    sums = bins + place_of(tl.arange(0, BINS), BINS)
    counted = tl.load(sums)
    masses = tl.load(sums + BINS)
    count = tl.load(counts)
    is_partial = count > CAPACITY
    is_listed = count <= CAPACITY
    count = tl.where(is_listed, count, vocabulary)
    # Of what is above all that is gone over.
    above = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    # The smallest key with too few above it; the best token's own has none above.
    key = tl.full([], _LEAST_KEY, tl.int32)
    left = tl.sum(masses, axis=0)
    wanted = total * top_p * MASS_SCALE
    if (top_k > 0) & (top_k < vocabulary):
        key, is_partial, is_listed, count, above, mass = _threshold(
            top_k, counted, masses, above, mass, is_partial, is_listed, count, bound, pivot, top, counts + 1,
            listed, listed_columns, logits, temperature, vocabulary, CAPACITY, BINS, TILE, IS_MASS=False,
        )  # fmt: skip
        left = mass + _mass_above(key - 1, top, count, is_listed, listed, logits, temperature, TILE)
        wanted = left.to(tl.float32) * top_p
    enough = tl.maximum(wanted.to(tl.int64), 1)
    # Rounded up, it may be more than there is: nothing is cut off then.
    if (top_p < 1.0) & (enough <= left):
        key, is_partial, is_listed, count, above, mass = _threshold(
            enough, counted, masses, above, mass, is_partial, is_listed, count, bound, pivot, top, counts + 1,
            listed, listed_columns, logits, temperature, vocabulary, CAPACITY, BINS, TILE, IS_MASS=True,
        )  # fmt: skip
    kept = mass + _mass_above(key - 1, top, count, is_listed, listed, logits, temperature, TILE)

    if is_partial:
        winner = _best_by_blocks(
            key, best_of_block + row * BLOCKS, token_of_block + row * BLOCKS, logits, temperature, vocabulary,
            place, slot, positions, seeds, ids, BLOCK, BLOCKS, PADDED, TILE, HAS_IDS,
        )  # fmt: skip
    else:
        winner = _best_listed(
            key, count, listed, listed_columns, place, slot, positions, seeds, ids, TILE, HAS_IDS
        )  # fmt: skip
    return winner, kept.to(tl.float32) / MASS_SCALE
