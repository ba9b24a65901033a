"""One product `x @ w.T` for a block of few rows, with what stands before and after it in a decoder layer.

Before: RMSNorm, from sums of squares that the kernel which wrote `x` left behind. After: bias, residual and the sums of
squares of the new rows, or SwiGLU over a joined gate/up matrix. Weights stream once from memory; a row's result depends
neither on the other rows nor on how many there are, as long as the tile's height is the same.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs


@triton.jit(do_not_specialize=["rows", "n_sums"])
def block_matmul(
    x,  # [rows, K]
    w,  # [N, K], or [2 N, K] with the gate's rows first
    bias,  # [N]
    norm_weight,  # [K]
    sums_in,  # float32 [rows, SUMS_STRIDE]: parts of each row's sum of squares
    sums_out,  # float32 [rows, SUMS_STRIDE]
    out,  # [rows, N]; with a residual it holds it, and is changed in place
    partial,  # float32 [blocks, PARTS, BLOCK_M, BLOCK_N]
    arrived,  # int32 [blocks], zero before and after
    rows,
    n,
    n_sums,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_FP32: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
    dtype = x.dtype.element_ty
    block = tl.program_id(0)
    part = tl.program_id(1)
    DEPTH: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = offs_m < rows
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    if HAS_NORM:
        offs_s = tl.arange(0, SUMS)
        parts = tl.load(
            sums_in + offs_m[:, None] * SUMS_STRIDE + offs_s[None, :],
            mask=is_row[:, None] & (offs_s[None, :] < n_sums),
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(parts, axis=1) / K + eps)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if IS_GATED:
        total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(part * DEPTH, tl.minimum(K, (part + 1) * DEPTH), BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x_mask = is_row[:, None] if EVEN_K else is_row[:, None] & (offs_k[None, :] < K)
        rows_in = tl.load(x + offs_m[:, None] * K + offs_k[None, :], mask=x_mask, other=0.0)
        if HAS_NORM:
            if EVEN_K:
                weight = tl.load(norm_weight + offs_k)
            else:
                weight = tl.load(norm_weight + offs_k, mask=offs_k < K, other=0.0)
            # The rounding of the modules: normalise in float32, round, then the weight.
            rows_in = (rows_in.to(tl.float32) * scale[:, None]).to(dtype) * weight[None, :]
        tile = weight_tile(w, offs_n, offs_k, n, K, BLOCK_K)
        total = tl.dot(rows_in, tile, total, input_precision=precision)
        if IS_GATED:
            tile_up = weight_tile(w + n.to(tl.int64) * K, offs_n, offs_k, n, K, BLOCK_K)
            total_up = tl.dot(rows_in, tile_up, total_up, input_precision=precision)
    if PARTS == 1:
        finish(
            total, total_up if IS_GATED else total, None, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
            SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, False, dtype,
        )  # fmt: skip
    else:
        total, is_last = add_parts(total, partial, arrived, block, part, is_row, BLOCK_M, BLOCK_N, PARTS)
        if is_last:
            finish(
                total, total, None, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
                SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, False, dtype,
            )  # fmt: skip


@triton.jit
def weight_tile(w, offs_n, offs_k, n, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[BLOCK_K, BLOCK_N]` of a weight `[N, K]`, whatever its dtype."""
    place = w + offs_n[None, :].to(tl.int64) * K + offs_k[:, None]
    if K % BLOCK_K == 0:
        return tl.load(place, mask=offs_n[None, :] < n, other=0)
    return tl.load(place, mask=(offs_n[None, :] < n) & (offs_k[:, None] < K), other=0)


@triton.jit
def add_parts(
    total, partial, arrived, block, part, is_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sum of all parts' `total`, and whether it is this program's to use.

    The parts are added in their order by whichever program comes last, so the order of arrival changes nothing.
    """
    cell = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    place = partial + block * PARTS * BLOCK_M * BLOCK_N + cell
    tl.store(place + part * BLOCK_M * BLOCK_N, total, mask=is_row[:, None])
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        tl.store(arrived + block, 0)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for each in tl.static_range(PARTS):
            total += tl.load(place + each * BLOCK_M * BLOCK_N, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
    return total, is_last


@triton.jit
def finish(
    total, total_up, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
    SUMS_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    is_column = offs_n < n
    mask = is_row[:, None] & is_column[None, :]
    place = out + offs_m[:, None].to(tl.int64) * n + offs_n[None, :]
    if HAS_SCALES:
        total = total * tl.load(scales + offs_n, mask=is_column, other=0.0)[None, :]
    if IS_GATED:
        if HAS_SCALES:
            total_up = total_up * tl.load(scales + n + offs_n, mask=is_column, other=0.0)[None, :]
        gate = total.to(dtype).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate))).to(dtype) * total_up.to(dtype)
    else:
        if HAS_BIAS:
            total += tl.load(bias + offs_n, mask=is_column, other=0.0).to(tl.float32)[None, :]
        value = total.to(dtype)
    if HAS_RESIDUAL:
        value = value + tl.load(place, mask=mask, other=0.0)
        squares = tl.where(mask, value.to(tl.float32) * value.to(tl.float32), 0.0)
        tl.store(sums_out + offs_m * SUMS_STRIDE + block, tl.sum(squares, axis=1), mask=is_row)
    tl.store(place, value, mask=mask)
