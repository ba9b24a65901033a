"""Rotary embedding, cache write and attention over the cache and the block itself.

Flash-decoding (Dao and others, 2023): the cache is cut at fixed positions into splits, each is reduced by itself, and
`add_up_splits` adds them up in their order. A query row's arithmetic is therefore the same whatever the block's length
and whatever else is in the batch. Query heads that share a KV head are rows of one tile; no head is copied.

Rows of the block are read from the product that made them, not from the cache, so that no program waits for another's
write. Cached rows at or past the position are never loaded.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.dependent import dependents_may_start, wait_for_inputs


@triton.jit
def rotate(first, second, cos, sin, dtype: tl.constexpr):
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def head_norm(first, second, weight, offs_h, eps, HALF: tl.constexpr, dtype: tl.constexpr):
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    low = (first * scale).to(dtype) * tl.load(weight + offs_h)[None, :]
    high = (second * scale).to(dtype) * tl.load(weight + HALF + offs_h)[None, :]
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def block_attention(
    qkv,  # [batch * rows, (HEADS + 2 KV_HEADS) * DIM]
    keys,  # [slot, KV_HEADS, CAPACITY, DIM] of one layer
    values,
    cos,  # [positions, DIM]; both halves of a row are the same
    sin,
    q_norm,  # [DIM]
    k_norm,
    slots,  # int32 [batch]
    positions,  # int64 [slots]
    partial,  # float32 [batch * rows, HEADS, SPLITS, DIM]
    partial_max,  # float32 [batch * rows, HEADS, SPLITS]
    partial_sum,
    rows,
    eps,
    scaling,
    SLOT_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    IS_FP32: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
    dtype = qkv.dtype.element_ty
    split = tl.program_id(0)
    head = tl.program_id(1) % KV_HEADS
    tile = tl.program_id(1) // KV_HEADS
    batch = tl.program_id(2)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    slot = tl.load(slots + batch).to(tl.int64)
    position = tl.load(positions + slot).to(tl.int32)
    first_key = split * SPLIT
    end = position + rows
    # Rows of this tile: query (row, head in the group), heads inmost.
    index = tile * TILE + tl.arange(0, TILE)
    row = index // GROUP
    is_query = row < rows
    last_row = tl.minimum((tile * TILE + TILE - 1) // GROUP, rows - 1)
    # Padding may reach beyond the cache's end; it is neither written nor looked at.
    active = tl.minimum((position + last_row) // SPLIT + 1, SPLITS)
    if split < active:
        offs_h = tl.arange(0, HALF)
        offs_d = tl.arange(0, DIM)
        at = position + row
        turn_at = tl.minimum(at, CAPACITY - 1)
        query = qkv + (batch * rows + row).to(tl.int64) * WIDTH + (head * GROUP + index % GROUP) * DIM
        q1 = tl.load(query[:, None] + offs_h[None, :], mask=is_query[:, None], other=0.0).to(tl.float32)
        q2 = tl.load(query[:, None] + HALF + offs_h[None, :], mask=is_query[:, None], other=0.0).to(tl.float32)
        if HAS_QK_NORM:
            q1, q2 = head_norm(q1, q2, q_norm, offs_h, eps, HALF, dtype)
        turn = turn_at[:, None] * DIM + offs_h[None, :]
        q1, q2 = rotate(
            q1,
            q2,
            tl.load(cos + turn, mask=is_query[:, None], other=0.0).to(tl.float32),
            tl.load(sin + turn, mask=is_query[:, None], other=0.0).to(tl.float32),
            dtype,
        )
        offs_j = first_key + tl.arange(0, SPLIT)
        base = slot * SLOT_STRIDE + head * CAPACITY * DIM
        cached = base + offs_j.to(tl.int64) * DIM
        is_cached = (offs_j < position)[:, None]
        k1 = tl.load(keys + cached[:, None] + offs_h[None, :], mask=is_cached, other=0.0)
        k2 = tl.load(keys + cached[:, None] + HALF + offs_h[None, :], mask=is_cached, other=0.0)
        v = tl.load(values + cached[:, None] + offs_d[None, :], mask=is_cached, other=0.0)
        if first_key + SPLIT > position:
            is_new = ((offs_j >= position) & (offs_j < end) & (offs_j < CAPACITY))[:, None]
            fresh = qkv + (batch * rows + offs_j - position).to(tl.int64) * WIDTH + (HEADS + head) * DIM
            n1 = tl.load(fresh[:, None] + offs_h[None, :], mask=is_new, other=0.0).to(tl.float32)
            n2 = tl.load(fresh[:, None] + HALF + offs_h[None, :], mask=is_new, other=0.0).to(tl.float32)
            if HAS_QK_NORM:
                n1, n2 = head_norm(n1, n2, k_norm, offs_h, eps, HALF, dtype)
            turn_k = offs_j[:, None] * DIM + offs_h[None, :]
            n1, n2 = rotate(
                n1,
                n2,
                tl.load(cos + turn_k, mask=is_new, other=0.0).to(tl.float32),
                tl.load(sin + turn_k, mask=is_new, other=0.0).to(tl.float32),
                dtype,
            )
            nv = tl.load(fresh[:, None] + KV_HEADS * DIM + offs_d[None, :], mask=is_new, other=0.0)
            # The last tile is the one that reaches every split with new rows.
            if tile == (rows * GROUP + TILE - 1) // TILE - 1:
                tl.store(keys + cached[:, None] + offs_h[None, :], n1, mask=is_new)
                tl.store(keys + cached[:, None] + HALF + offs_h[None, :], n2, mask=is_new)
                tl.store(values + cached[:, None] + offs_d[None, :], nv, mask=is_new)
            k1 = tl.where(is_new, n1, k1)
            k2 = tl.where(is_new, n2, k2)
            v = tl.where(is_new, nv, v)
        scores = tl.dot(q1, tl.trans(k1), input_precision=precision)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=precision)
        may_look = (offs_j[None, :] <= at[:, None]) & is_query[:, None]
        scores = tl.where(may_look, scores * scaling, float("-inf"))
        largest = tl.max(scores, axis=1)
        # A row that may look at nothing of this split: exp(-inf - -inf) would be NaN.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(scores - shift[:, None])
        total = tl.dot(weights.to(dtype), v, input_precision=precision)
        place = ((batch * rows + row) * HEADS + head * GROUP + index % GROUP) * SPLITS + split
        tl.store(partial_max + place, largest, mask=is_query)
        tl.store(partial_sum + place, tl.sum(weights, axis=1), mask=is_query)
        tl.store(partial + place[:, None].to(tl.int64) * DIM + offs_d[None, :], total, mask=is_query[:, None])


@triton.jit(do_not_specialize=["rows"])
def add_up_splits(
    partial, partial_max, partial_sum, slots, positions,
    out,  # [batch * rows, HEADS * DIM]
    rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a row and head. The first of a row's splits is never without a key that it may look at."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    dtype = out.dtype.element_ty
    slot = tl.load(slots + index // rows)
    position = tl.load(positions + slot).to(tl.int32)
    active = tl.minimum((position + index % rows) // SPLIT + 1, SPLITS)
    base = (index * HEADS + head) * SPLITS
    offs_d = tl.arange(0, DIM)
    largest = float("-inf")
    weight = 0.0
    total = tl.zeros((DIM,), dtype=tl.float32)
    for start in range(0, active, CHUNK):
        part = start + tl.arange(0, CHUNK)
        is_part = part < active
        these = tl.load(partial_max + base + part, mask=is_part, other=float("-inf"))
        sums = tl.load(partial_sum + base + part, mask=is_part, other=0.0)
        rows_in = tl.load(
            partial + (base + part[:, None]).to(tl.int64) * DIM + offs_d[None, :], mask=is_part[:, None], other=0.0
        )
        top = tl.maximum(largest, tl.max(these, axis=0))
        factor = tl.exp(these - top)
        before = tl.exp(largest - top)
        weight = weight * before + tl.sum(sums * factor, axis=0)
        total = total * before + tl.sum(rows_in * factor[:, None], axis=0)
        largest = top
    tl.store(out + (index * HEADS + head).to(tl.int64) * DIM + offs_d, (total / weight).to(dtype))


@triton.jit(do_not_specialize=["rows"])
def rotate_and_write(
    qkv,  # [batch * rows, (HEADS + 2 KV_HEADS) * DIM]; queries are rotated in place
    keys, values, cos, sin, q_norm, k_norm, slots, positions, rows, eps,
    SLOT_STRIDE: tl.constexpr, CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, HAS_QK_NORM: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """For blocks too wide for `block_attention`: everything that comes before attention, one program a row and head."""
    HALF: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    dtype = qkv.dtype.element_ty
    index = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    batch = index // rows
    slot = tl.load(slots + batch).to(tl.int64)
    at = tl.load(positions + slot).to(tl.int32) + index % rows
    fits = at < CAPACITY
    turn = tl.minimum(at, CAPACITY - 1) * DIM
    offs_h = tl.arange(0, HALF)
    one = tl.arange(0, 1)
    source = qkv + index.to(tl.int64) * WIDTH + head * DIM
    first = tl.load(source + one[:, None] + offs_h[None, :]).to(tl.float32)
    second = tl.load(source + one[:, None] + HALF + offs_h[None, :]).to(tl.float32)
    kv_head = head - HEADS
    if head < HEADS + KV_HEADS:
        if HAS_QK_NORM:
            if head < HEADS:
                first, second = head_norm(first, second, q_norm, offs_h, eps, HALF, dtype)
            else:
                first, second = head_norm(first, second, k_norm, offs_h, eps, HALF, dtype)
        low, high = rotate(
            first,
            second,
            tl.load(cos + turn + offs_h)[None, :].to(tl.float32),
            tl.load(sin + turn + offs_h)[None, :].to(tl.float32),
            dtype,
        )
        if head < HEADS:
            tl.store(source + one[:, None] + offs_h[None, :], low)
            tl.store(source + one[:, None] + HALF + offs_h[None, :], high)
        else:
            target = keys + slot * SLOT_STRIDE + (kv_head * CAPACITY + at).to(tl.int64) * DIM
            tl.store(target + one[:, None] + offs_h[None, :], low, mask=fits)
            tl.store(target + one[:, None] + HALF + offs_h[None, :], high, mask=fits)
    else:
        target = values + slot * SLOT_STRIDE + ((kv_head - KV_HEADS) * CAPACITY + at).to(tl.int64) * DIM
        tl.store(target + one[:, None] + offs_h[None, :], first.to(dtype), mask=fits)
        tl.store(target + one[:, None] + HALF + offs_h[None, :], second.to(dtype), mask=fits)


@triton.jit(do_not_specialize=["rows"])
def wide_attention(
    qkv, keys, values, slots, positions, out, rows, scaling,
    SLOT_STRIDE: tl.constexpr, CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, IS_FP32: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """After `rotate_and_write`: FlashAttention-2 over the cache, a tile of (row, head in the group) at once."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
    dtype = qkv.dtype.element_ty
    # The last tiles look at the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    wait_for_inputs(IS_DEPENDENT)
    dependents_may_start(IS_DEPENDENT)
    slot = tl.load(slots + batch).to(tl.int64)
    position = tl.load(positions + slot).to(tl.int32)
    index = tile * TILE + tl.arange(0, TILE)
    row = index // GROUP
    is_query = row < rows
    at = position + row
    offs_d = tl.arange(0, DIM)
    query = qkv + (batch * rows + row).to(tl.int64) * WIDTH + (head * GROUP + index % GROUP) * DIM
    q = tl.load(query[:, None] + offs_d[None, :], mask=is_query[:, None], other=0.0)
    base = slot * SLOT_STRIDE + head * CAPACITY * DIM
    last_row = tl.minimum((tile * TILE + TILE - 1) // GROUP, rows - 1)
    end = tl.minimum(position + last_row + 1, CAPACITY)
    largest = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((TILE,), dtype=tl.float32)
    total = tl.zeros((TILE, DIM), dtype=tl.float32)
    for start in range(0, end, BLOCK):
        offs_j = start + tl.arange(0, BLOCK)
        cached = base + offs_j.to(tl.int64) * DIM
        is_there = (offs_j < end)[:, None]
        k = tl.load(keys + cached[:, None] + offs_d[None, :], mask=is_there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        may_look = offs_j[None, :] <= at[:, None]
        scores = tl.where(may_look, scores * scaling, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - top[:, None])
        factor = tl.exp(largest - top)
        weight = weight * factor + tl.sum(weights, axis=1)
        v = tl.load(values + cached[:, None] + offs_d[None, :], mask=is_there, other=0.0)
        total = total * factor[:, None] + tl.dot(weights.to(dtype), v, input_precision=precision)
        largest = top
    place = out + (batch * rows + row).to(tl.int64) * (HEADS * DIM) + (head * GROUP + index % GROUP) * DIM
    tl.store(place[:, None] + offs_d[None, :], (total / weight[:, None]).to(dtype), mask=is_query[:, None])
