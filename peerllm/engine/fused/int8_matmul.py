"""Products with int8 weights on the integer matrix units: no weight is ever converted.

Turning every weight into a float costs more instructions than the units have time for while the bytes stream in. So it
is the few rows of activations that are turned into integers: `split_rows` writes each row as fixed point, its largest
value the scale, in `PLANES` digits of base 256, one int8 plane a digit. `int8_matmul` multiplies each plane by the
weights as they are, in int32, and weighs the sums at the end. Sums of integers are exact: a row's result depends
neither on the other rows nor on the tile's shape, only on how many parts its depth is cut into.

Two planes are 16 bits below the row's largest value: an error of at most sqrt(depth) * 9e-6 of the product's size,
about that of rounding its inputs to float16. Three serve float32.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs
from peerllm.engine.fused.matmul import add_parts, finish, weight_tile


@triton.jit
def split_rows(
    x,  # [rows, K]
    norm_weight,  # [K]
    planes,  # int8 [PLANES, …, K], the lowest digit first
    steps,  # float32 [rows]: what a one in the lowest digit is worth
    plane_stride,
    eps,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    TOP: tl.constexpr = 127 * 256 ** (PLANES - 1)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PADDED)
    mask = offs < K
    dtype = x.dtype.element_ty
    values = tl.load(x + row * K + offs, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    if HAS_NORM:
        # The rounding of the modules: normalise in float32, round, then the weight.
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
        values = (wide * scale).to(dtype) * tl.load(norm_weight + offs, mask=mask, other=0.0)
        wide = values.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=0)
    inverse = tl.where(largest > 0, TOP / largest, 0.0)
    whole = tl.floor(wide * inverse + 0.5).to(tl.int32)
    for plane in tl.static_range(PLANES):
        digit = ((whole + 128) & 255) - 128
        tl.store(planes + plane * plane_stride + row * K + offs, digit.to(tl.int8), mask=mask)
        whole = (whole - digit) >> 8
    # A value that is not finite makes no digits; the whole row becomes what it is: not finite.
    tl.store(steps + row, largest / TOP + tl.sum(wide * 0.0, axis=0))


@triton.jit(do_not_specialize=["rows"])
def int8_matmul(
    planes,  # int8 [PLANES, >= rows, K]
    steps,  # float32 [rows]
    w,  # int8 [N, K], or [2 N, K] with the gate's rows first
    scales,  # float32 [N] or [2 N]
    bias,  # [N]
    sums_out,  # float32 [rows, SUMS_STRIDE]: parts of each row's sum of squares
    out,  # [rows, N]; with a residual it holds it, and is changed in place
    partial,  # float32 [blocks, PARTS, BLOCK_M, BLOCK_N]
    arrived,  # int32 [blocks], zero before and after
    plane_stride,
    rows,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUMS_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    DEPTH: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K
    dtype = out.dtype.element_ty
    block = tl.program_id(0)
    part = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = offs_m < rows
    # Of two planes only `low` and `high` are there; of three `middle` too.
    low = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    middle = low
    high = low
    up_low = low
    up_middle = low
    up_high = low
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    for start in range(part * DEPTH, tl.minimum(K, (part + 1) * DEPTH), BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        tile = weight_tile(w, offs_n, offs_k, n, K, BLOCK_K)
        x_low = _plane(planes, offs_m, is_row, offs_k, K, BLOCK_K)
        x_high = _plane(planes + (PLANES - 1) * plane_stride, offs_m, is_row, offs_k, K, BLOCK_K)
        low = tl.dot(x_low, tile, low, out_dtype=tl.int32)
        high = tl.dot(x_high, tile, high, out_dtype=tl.int32)
        if PLANES == 3:
            x_middle = _plane(planes + plane_stride, offs_m, is_row, offs_k, K, BLOCK_K)
            middle = tl.dot(x_middle, tile, middle, out_dtype=tl.int32)
        if IS_GATED:
            tile_up = weight_tile(w + n.to(tl.int64) * K, offs_n, offs_k, n, K, BLOCK_K)
            up_low = tl.dot(x_low, tile_up, up_low, out_dtype=tl.int32)
            up_high = tl.dot(x_high, tile_up, up_high, out_dtype=tl.int32)
            if PLANES == 3:
                up_middle = tl.dot(x_middle, tile_up, up_middle, out_dtype=tl.int32)
    step = tl.load(steps + offs_m, mask=is_row, other=0.0)[:, None]
    total = _weigh(low, middle, high, PLANES) * step
    total_up = _weigh(up_low, up_middle, up_high, PLANES) * step if IS_GATED else total
    if PARTS == 1:
        finish(
            total, total_up, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
            SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, True, dtype,
        )  # fmt: skip
    else:
        total, is_last = add_parts(total, partial, arrived, block, part, is_row, BLOCK_M, BLOCK_N, PARTS)
        if is_last:
            finish(
                total, total, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
                SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, True, dtype,
            )  # fmt: skip


@triton.jit
def _plane(plane, offs_m, is_row, offs_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    # Every program reads all rows: what need not be read is worth a mask.
    place = plane + offs_m[:, None] * K + offs_k[None, :]
    if K % BLOCK_K == 0:
        return tl.load(place, mask=is_row[:, None], other=0)
    return tl.load(place, mask=is_row[:, None] & (offs_k[None, :] < K), other=0)


@triton.jit
def _weigh(low, middle, high, PLANES: tl.constexpr):
    if PLANES == 3:
        return (high.to(tl.float32) * 256.0 + middle.to(tl.float32)) * 256.0 + low.to(tl.float32)
    return high.to(tl.float32) * 256.0 + low.to(tl.float32)
