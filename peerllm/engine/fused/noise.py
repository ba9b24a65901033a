"""`engine.noise` in kernels, bit for bit: Philox4x32-10, key = seed, counter = (token // 4, position, 0, 0), word =
token % 4."""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def perturb(score, column, is_column, place, slot, positions, seeds, ids, HAS_IDS: tl.constexpr):
    """`score` - log E of each column, for the token `place` + 1 after the slot's position."""
    position = (tl.load(positions + slot) + place + 1).to(tl.uint32)
    key0 = tl.load(seeds + slot * 2).to(tl.uint32)
    key1 = tl.load(seeds + slot * 2 + 1).to(tl.uint32)
    token = tl.load(ids + column, mask=is_column, other=0) if HAS_IDS else column
    word = _philox_word(token, position, key0, key1)
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    return score - tl.log(_minus_log1p_of_minus(uniform))
