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


@triton.jit
def _weights(
    w, offs_n, offs_k, n, k, W_STRIDE: tl.constexpr, EVEN_K: tl.constexpr, IS_INT8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    place = w + offs_n[None, :].to(tl.int64) * W_STRIDE + offs_k[:, None]
    if EVEN_K:
        tile = tl.load(place, mask=offs_n[None, :] < n, other=0)
    else:
        tile = tl.load(place, mask=(offs_n[None, :] < n) & (offs_k[:, None] < k), other=0)
    if IS_INT8 and dtype == tl.float16:
        # A conversion costs more than the product here. 0x6400 + u are float16's bits of 1024 + u, exactly.
        biased = (tile.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return biased.to(tl.float16, bitcast=True) - 1152.0
    return tile.to(dtype)


@triton.jit(do_not_specialize=["rows", "n_sums"])
def block_matmul(
    x,  # [rows, K]
    w,  # [N, K], or [2 N, K] with the gate's rows first
    scales,  # float32 [N] or [2 N]: of int8 weights, one a channel
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
    IS_INT8: tl.constexpr,
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
        tile = _weights(w, offs_n, offs_k, n, K, K, EVEN_K, IS_INT8, dtype)
        total = tl.dot(rows_in, tile, total, input_precision=precision)
        if IS_GATED:
            tile_up = _weights(w + n.to(tl.int64) * K, offs_n, offs_k, n, K, K, EVEN_K, IS_INT8, dtype)
            total_up = tl.dot(rows_in, tile_up, total_up, input_precision=precision)
    if PARTS == 1:
        finish(
            total, total_up if IS_GATED else total, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
            SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, IS_INT8, dtype,
        )  # fmt: skip
    else:
        # The parts are added in their order by whichever program comes last, so the order of arrival changes nothing.
        tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        place = partial + block * PARTS * BLOCK_M * BLOCK_N + tile
        tl.store(place + part * BLOCK_M * BLOCK_N, total, mask=is_row[:, None])
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before == PARTS - 1:
            tl.store(arrived + block, 0)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(
                    place + each * BLOCK_M * BLOCK_N, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
                )
            finish(
                total, total, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
                SUMS_STRIDE, HAS_BIAS, HAS_RESIDUAL, IS_GATED, IS_INT8, dtype,
            )  # fmt: skip


@triton.jit
def finish(
    total, total_up, scales, bias, sums_out, out, block, offs_m, offs_n, is_row, n,
    SUMS_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
    IS_INT8: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    is_column = offs_n < n
    mask = is_row[:, None] & is_column[None, :]
    place = out + offs_m[:, None].to(tl.int64) * n + offs_n[None, :]
    if IS_INT8:
        total = total * tl.load(scales + offs_n, mask=is_column, other=0.0)[None, :]
    if IS_GATED:
        if IS_INT8:
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
