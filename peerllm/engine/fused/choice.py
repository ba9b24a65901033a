"""From logits to tokens on the device: noise, argmax, the verdict on a block, the draft's own next step.

The noise is `engine.noise`'s, bit for bit: Philox4x32-10, key = seed, counter = (token // 4, position, 0, 0), word =
token % 4. A block of the vocabulary gives its best token first; one more program gathers the blocks in order, so that
of equal scores the lowest token wins, as in torch on the CPU.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs


@triton.jit
def _philox_word(token, position, key0, key1):
    """uint32 of each token; `position`, `key0` and `key1` are scalars, uint32."""
    c0 = (token // 4).to(tl.uint32)
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + key0
    k1 = tl.zeros_like(c0) + key1
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32))
        low0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        low1 = c2 * tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    word = token % 4
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def _minus_log1p_of_minus(u):
    """-log1p(-u) for 0 < u < 1, to a few units in the last place (Kahan's correction of log)."""
    rest = 1.0 - u
    is_tiny = rest == 1.0
    return tl.where(is_tiny, u, -tl.log(rest) * (u / tl.where(is_tiny, 1.0, 1.0 - rest)))


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
    ids,  # int32 [vocabulary]: the columns' tokens, ascending, where the head is cut
    vocabulary,
    rows_per_sequence,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
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
        raw = raw / temperature
        position = (tl.load(positions + slot) + row % rows_per_sequence + 1).to(tl.uint32)
        key0 = tl.load(seeds + slot * 2).to(tl.uint32)
        key1 = tl.load(seeds + slot * 2 + 1).to(tl.uint32)
        target_token = tl.load(ids + token, mask=is_token, other=0) if HAS_IDS else token
        word = _philox_word(target_token, position, key0, key1)
        uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
        score = raw - tl.log(_minus_log1p_of_minus(uniform))
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


@triton.jit
def _best_of_row(best, best_token, row, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    offs = tl.arange(0, PADDED)
    is_block = offs < BLOCKS
    score = tl.load(best + row * BLOCKS + offs, mask=is_block, other=float("-inf"))
    token = tl.load(best_token + row * BLOCKS + offs, mask=is_block, other=0x7FFFFFFF)
    top = tl.max(score, axis=0)
    return tl.min(tl.where(score == top, token, 0x7FFFFFFF), axis=0)


@triton.jit
def choose_rows(
    best, best_token, bad,
    choices,  # int32 [rows]
    flags,  # int32 [rows]: logits that are not finite
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0)
    tl.store(choices + row, _best_of_row(best, best_token, row, BLOCKS, PADDED))
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
    best, best_token, largest, mass, bad, logits,
    slots, positions, temperatures,
    token,  # int64 [1]: the step's input, then its choice
    step,  # int32 [1]
    candidates,  # int32 [steps]
    probabilities,  # float32 [steps]; NaN where logits are not finite
    ids,
    STRIDE: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, HAS_IDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    choice = _best_of_row(best, best_token, 0, BLOCKS, PADDED)
    offs = tl.arange(0, PADDED)
    is_block = offs < BLOCKS
    limits = tl.load(largest + offs, mask=is_block, other=float("-inf"))
    sums = tl.load(mass + offs, mask=is_block, other=0.0)
    top = tl.max(limits, axis=0)
    total = tl.sum(sums * tl.exp(limits - top), axis=0)
    slot = tl.load(slots)
    temperature = tl.load(temperatures + slot)
    own = tl.load(logits + choice).to(tl.float32)
    own = tl.where(temperature > 0.0, own / tl.where(temperature > 0.0, temperature, 1.0), own)
    probability = tl.exp(own - top) / total
    is_bad = tl.sum(tl.load(bad + offs, mask=is_block, other=0), axis=0) > 0
    at = tl.load(step)
    if HAS_IDS:
        choice = tl.load(ids + choice)
    tl.store(candidates + at, choice)
    tl.store(probabilities + at, tl.where(is_bad, float("nan"), probability))
    tl.store(token, choice.to(tl.int64))
    tl.store(positions + slot, tl.load(positions + slot) + 1)
    tl.store(step, at + 1)
