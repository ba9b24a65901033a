"""Row-wise kernels: the embedding or a peer's rows as a block's input, and norm and SwiGLU for wide blocks."""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs


@triton.jit
def take_in(
    source,  # [rows, WIDTH], or the embedding [vocabulary, WIDTH]
    tokens,  # int64 [rows], with an embedding
    out,  # [rows, WIDTH]
    sums,  # float32 [rows, SUMS_STRIDE]: column 0 gets the sum of squares
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SUMS_STRIDE: tl.constexpr,
    IS_EMBEDDING: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0)
    offs = tl.arange(0, PADDED)
    mask = offs < WIDTH
    from_row = tl.load(tokens + row) if IS_EMBEDDING else row.to(tl.int64)
    values = tl.load(source + from_row * WIDTH + offs, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + offs, values, mask=mask)
    squares = values.to(tl.float32) * values.to(tl.float32)
    tl.store(sums + row * SUMS_STRIDE, tl.sum(squares, axis=0))


@triton.jit
def add_and_norm(
    hidden,  # [rows, WIDTH]; gets hidden + delta
    delta,  # [rows, WIDTH]
    weight,  # [WIDTH]
    out,  # [rows, WIDTH]: the norm of the new rows
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PADDED)
    mask = offs < WIDTH
    dtype = hidden.dtype.element_ty
    values = tl.load(hidden + row * WIDTH + offs, mask=mask, other=0.0)
    if HAS_DELTA:
        values = values + tl.load(delta + row * WIDTH + offs, mask=mask, other=0.0)
        tl.store(hidden + row * WIDTH + offs, values, mask=mask)
    if HAS_NORM:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
        normed = (wide * scale).to(dtype) * tl.load(weight + offs, mask=mask, other=0.0)
        tl.store(out + row * WIDTH + offs, normed, mask=mask)


@triton.jit
def swiglu(
    gate_up,  # [rows, 2 INNER], the gate first
    out,  # [rows, INNER]
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < INNER
    dtype = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * INNER + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + offs, mask=mask, other=0.0)
    value = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up
    tl.store(out + row * INNER + offs, value, mask=mask)
