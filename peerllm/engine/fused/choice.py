"""From logits to tokens on the device: noise, argmax, the verdict on a block, the draft's own next step.

A block of the vocabulary gives its best token first; one more program gathers the blocks in order, so that of equal
scores the lowest token wins, as in torch on the CPU. Where top-k or top-p cut a row, that program chooses again, among
the survivors that `cut` finds.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.contenders import is_row_cut
from peerllm.engine.fused.cut import best_of_survivors
from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs
from peerllm.engine.fused.noise import perturb


@triton.jit(do_not_specialize=["rows_per_sequence"])
def best_of_blocks(
    logits,  # [rows, STRIDE]
    slots,  # int32 [batch]
    positions,  # int64 [slots]: of the block's row 0
    seeds,  # int64 [slots, 2]: low and high 32 bits
    temperatures,  # float32 [slots]; 0 is greedy
    best,  # float32 [rows, BLOCKS]
    best_token,  # int32 [rows, BLOCKS]
    largest,  # float32 [rows, BLOCKS]: of the logits over temperature
    mass,  # float32 [rows, BLOCKS]: sum of exp(. - largest)
    bad,  # int32 [rows, BLOCKS]: logits that are NaN or +inf
    counts,  # int32 [rows, 2], and
    bins,  # int64 [rows, 2, BINS]: set to 0 for `contenders.list_contenders`
    ids,  # int32 [vocabulary]: the columns' tokens, ascending, where the head is cut
    vocabulary,
    rows_per_sequence,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BINS: tl.constexpr,
    ZEROED: tl.constexpr,  # sums of bins that one block sets to 0
    HAS_IDS: tl.constexpr,
    IS_CUTTING: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    slot = tl.load(slots + row // rows_per_sequence)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    raw = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=is_token, other=float("-inf")).to(tl.float32)
    is_bad = ((raw != raw) | (raw == float("inf"))) & is_token
    temperature = tl.load(temperatures + slot)
    score = raw
    if temperature > 0.0:
        raw = tl.div_rn(raw, temperature)
        score = perturb(raw, token, is_token, row % rows_per_sequence, slot, positions, seeds, ids, HAS_IDS)
    score = tl.where(is_token, score, float("-inf"))
    # NaN would win or lose by chance; the row is refused, so any token will do.
    score = tl.where(score != score, float("-inf"), score)
    top = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == top, token, 0x7FFFFFFF), axis=0)
    place = row * BLOCKS + block
    tl.store(best + place, top)
    tl.store(best_token + place, winner)
    limit = tl.max(tl.where(is_token, raw, float("-inf")), axis=0)
    shift = tl.where(limit == float("-inf"), 0.0, limit)
    tl.store(largest + place, limit)
    tl.store(mass + place, tl.sum(tl.where(is_token, tl.exp(raw - shift), 0.0), axis=0))
    tl.store(bad + place, tl.sum(is_bad.to(tl.int32), axis=0))
    if IS_CUTTING:
        if block == 0:
            tl.store(counts + row * 2, 0)
        offs = block * ZEROED + tl.arange(0, ZEROED)
        tl.store(bins + row * 2 * BINS + offs, tl.zeros([ZEROED], tl.int64), mask=offs < 2 * BINS)


@triton.jit
def _best_of_row(best, best_token, row, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    offs = tl.arange(0, PADDED)
    is_block = offs < BLOCKS
    score = tl.load(best + row * BLOCKS + offs, mask=is_block, other=float("-inf"))
    token = tl.load(best_token + row * BLOCKS + offs, mask=is_block, other=0x7FFFFFFF)
    top = tl.max(score, axis=0)
    return tl.min(tl.where(score == top, token, 0x7FFFFFFF), axis=0)


@triton.jit
def _mass_of_row(largest, mass, row, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The largest score of the row, and the sum of exp(score - that)."""
    offs = tl.arange(0, PADDED)
    is_block = offs < BLOCKS
    limits = tl.load(largest + row * BLOCKS + offs, mask=is_block, other=float("-inf"))
    sums = tl.load(mass + row * BLOCKS + offs, mask=is_block, other=0.0)
    top = tl.max(limits, axis=0)
    return top, tl.sum(sums * tl.exp(limits - top), axis=0)


@triton.jit(do_not_specialize=["rows_per_sequence"])
def choose_rows(
    best, best_token, largest, mass, bad, counts, bins, marks, listed, listed_columns, logits,
    slots, positions, seeds, temperatures, top_ks, top_ps, ids,
    choices,  # int32 [rows]
    flags,  # int32 [rows]: logits that are not finite
    vocabulary, rows_per_sequence,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
    HAS_IDS: tl.constexpr, IS_CUTTING: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0)
    choice = _best_of_row(best, best_token, row, BLOCKS, PADDED)
    if IS_CUTTING:
        slot = tl.load(slots + row // rows_per_sequence)
        if is_row_cut(slot, temperatures, top_ks, top_ps, vocabulary):
            top, total = _mass_of_row(largest, mass, row, BLOCKS, PADDED)
            survivor, _ = best_of_survivors(
                top, total, best, best_token,
                row, slot, row % rows_per_sequence, counts, bins, marks, listed, listed_columns, logits,
                positions, seeds, temperatures, top_ks, top_ps, ids, vocabulary,
                STRIDE, BLOCK, BLOCKS, PADDED, BINS, CAPACITY, TILE, HAS_IDS,
            )  # fmt: skip
            choice = tl.where(survivor < vocabulary, survivor, choice)
    tl.store(choices + row, choice)
    offs = tl.arange(0, PADDED)
    found = tl.load(bad + row * BLOCKS + offs, mask=offs < BLOCKS, other=0)
    tl.store(flags + row, tl.sum(found, axis=0))


@triton.jit
def judge_block(
    choices, flags,
    candidates,  # int32 [>= rows - 1]
    count,  # int32 [1]: candidates in this block; rows beyond count + 1 are padding
    verdict,  # int32 [3]: accepted, next token, logits that are not finite
    PADDED: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    n = tl.load(count)
    offs = tl.arange(0, PADDED)
    choice = tl.load(choices + offs, mask=offs <= n, other=-1)
    candidate = tl.load(candidates + offs, mask=offs < n, other=-2)
    # The first place that disagrees; place n, which has no candidate, always does.
    accepted = tl.min(tl.where(choice == candidate, PADDED, offs), axis=0)
    flag = tl.load(flags + offs, mask=offs <= n, other=0)
    tl.store(verdict, accepted)
    tl.store(verdict + 1, tl.sum(tl.where(offs == accepted, choice, 0), axis=0))
    tl.store(verdict + 2, tl.sum(flag, axis=0))


@triton.jit
def advance_draft(
    best, best_token, largest, mass, bad, counts, bins, marks, listed, listed_columns, logits,
    slots, positions, seeds, temperatures, top_ks, top_ps,
    token,  # int64 [1]: the step's input, then its choice
    step,  # int32 [1]
    candidates,  # int32 [steps]
    probabilities,  # float32 [steps]: after the cut; NaN where logits are not finite
    ids, vocabulary,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
    HAS_IDS: tl.constexpr, IS_CUTTING: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0)
    choice = _best_of_row(best, best_token, row, BLOCKS, PADDED)
    top, total = _mass_of_row(largest, mass, row, BLOCKS, PADDED)
    slot = tl.load(slots)
    if IS_CUTTING:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if is_row_cut(slot, temperatures, top_ks, top_ps, vocabulary):
            survivor, kept = best_of_survivors(
                top, total, best, best_token,
                row, slot, 0, counts, bins, marks, listed, listed_columns, logits,
                positions, seeds, temperatures, top_ks, top_ps, ids, vocabulary,
                STRIDE, BLOCK, BLOCKS, PADDED, BINS, CAPACITY, TILE, HAS_IDS,
            )  # fmt: skip
            choice = tl.where(survivor < vocabulary, survivor, choice)
            total = kept
    temperature = tl.load(temperatures + slot)
    own = tl.load(logits + choice).to(tl.float32)
    own = tl.where(temperature > 0.0, tl.div_rn(own, tl.where(temperature > 0.0, temperature, 1.0)), own)
    probability = tl.exp(own - top) / total
    offs = tl.arange(0, PADDED)
    is_bad = tl.sum(tl.load(bad + offs, mask=offs < BLOCKS, other=0), axis=0) > 0
    at = tl.load(step)
    if HAS_IDS:
        choice = tl.load(ids + choice)
    tl.store(candidates + at, choice)
    tl.store(probabilities + at, tl.where(is_bad, float("nan"), probability))
    tl.store(token, choice.to(tl.int64))
    tl.store(positions + slot, tl.load(positions + slot) + 1)
    tl.store(step, at + 1)
