"""A small model's layers for one token as one kernel: every multiprocessor takes its rows of each product.

A draft's step is 120 products and attentions whose bytes need 1 to 4 microseconds each, and a kernel of its own costs
each of them more than that. Here the programs stay, meet between stages, and read the next stage's weights into
registers while they wait for each other: weights do not depend on what the others compute.

One row needs no matrix units: a warp holds whole rows of a weight and multiplies them with the vector.
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from peerllm.engine.fused.attention import head_norm, rotate

CHUNK = tl.constexpr(256)
"""Columns that a warp reads at once: 16 bytes a thread."""
BLOCK = tl.constexpr(64)
"""Positions of the cache that are looked at together."""
TILE = tl.constexpr(16)
"""Query heads of a KV head, padded: the least that the matrix units take."""
SPLITS_AT_ONCE = tl.constexpr(16)
ROWS_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))
"""Whether rows are the first of three axes, before the chunks, or the second. Triton deals its warps out along one of
the two: up to 3.6 along the first, from 3.7 on along the second. A row that several warps have is added up by way of
shared memory: up to 774 barriers in place of 43."""
QKV, QKV_BIAS, OUTPUT, GATE_UP, DOWN, FIRST_NORM, SECOND_NORM, Q_NORM, K_NORM, DISTANCES = map(tl.constexpr, range(10))
"""Columns of the table of a layer's tensors; the last is their number."""


@triton.jit
def _arrive(arrived):
    """What this program wrote can be read by those who wait for it. Loads that come before would hold this up."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@triton.jit
def _wait(arrived, count):
    """Goes on when `count` arrivals are there in all."""
    while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def _tensor(near, table, layer, which: tl.constexpr):
    """A layer's tensor, by its distance from another: of a bare address no alignment is known."""
    return near + tl.multiple_of(tl.load(table + layer * DISTANCES + which), 8)


@triton.jit
def _down(row):
    """`row` `[ROWS]` as of three axes."""
    if ROWS_FIRST:
        return row[:, None, None]
    else:
        return row[None, :, None]


@triton.jit
def _columns(CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS) * CHUNK
    if ROWS_FIRST:
        return chunk[None, :, None] + tl.arange(0, CHUNK)[None, None, :]
    else:
        return chunk[:, None, None] + tl.arange(0, CHUNK)[None, None, :]


@triton.jit
def _over_columns(values):
    """Their sum for each row, `[ROWS]`: of all chunks first, which one thread has."""
    if ROWS_FIRST:
        return tl.sum(tl.sum(values, axis=1), axis=1)
    else:
        return tl.sum(tl.sum(values, axis=0), axis=1)


@triton.jit
def _vector(x, start, K: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """`[ROWS, CHUNKS, CHUNK]`: `x` `[K]` from `start` on, once for each row: then a thread has of it what it has of the
    weights, and nothing has to be moved between warps."""
    at = start + _columns(CHUNKS) + _down(tl.zeros((ROWS,), dtype=tl.int32))
    return tl.load(x + at, mask=at < K, other=0.0)


@triton.jit
def _weights(w, first, end, start, K: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """`[ROWS, CHUNKS, CHUNK]` of `w` `[N, K]` from row `first` and column `start` on; zeros from row `end` on."""
    row = first + tl.arange(0, ROWS)
    at = start + _columns(CHUNKS)
    return tl.load(w + _down(row).to(tl.int64) * K + at, mask=_down(row < end) & (at < K), other=0.0)


@triton.jit
def _tiles(
    w, first, end, K: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr
):
    """Tiles `FROM` to `TO` of the rows from `first` on, on their way to registers."""
    tiles = ()
    for tile in tl.static_range(FROM, TO):
        tiles = tiles + (_weights(w, first + tile * ROWS, end, 0, K, CHUNKS, ROWS),)  # noqa: RUF005
    return tiles


@triton.jit
def _times(weights, x):
    """float32 `[ROWS]`."""
    return _over_columns(weights.to(tl.float32) * x)


@triton.jit
def _put(out, row, value, end):
    """`value` `[ROWS]` at `row`, by the warps that have it: a store of a vector would move it to one warp, and all
    would wait for that."""
    lane = tl.arange(0, 32)[None, :]
    tl.store(out + row[:, None] + lane, value[:, None], mask=(row < end)[:, None] & (lane == 0))


@triton.jit
def _put_hidden(hidden, scaled, norm, sums, new, first, end, program, ROWS: tl.constexpr):
    """This program's rows of the hidden states; what the next products take of them before they are normed; and the
    sum of their squares."""
    row = first + tl.arange(0, ROWS)
    mask = row < end
    wide = tl.where(mask, new.to(tl.float32), 0.0)
    _put(hidden, row, new, end)
    _put(scaled, row, wide * tl.load(norm + row, mask=mask, other=0.0).to(tl.float32), end)
    tl.store(sums + program, tl.sum(wide * wide, axis=0))


@triton.jit
def _norm_scale(sums, eps, K: tl.constexpr, PROGRAMS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """float32 `[ROWS]`, all the same: what the norm divides by, inverted. It is a factor of whole products."""
    squares = _vector(sums, 0, PROGRAMS, CHUNKS, ROWS)
    return tl.rsqrt(_over_columns(squares) / K + eps)


@triton.jit
def draft_step(
    table,  # int64 [LAYERS, DISTANCES]: elements from `embedding` on
    token,  # int64 [1]
    embedding,  # [vocabulary, WIDTH]
    cos,  # [positions, DIM]
    sin,
    keys,  # [layer, slot, KV_HEADS, CAPACITY, DIM]
    values,
    slots,  # int32 [1]
    positions,  # int64 [slots]
    hidden,  # [WIDTH]: the result
    scaled,  # float32 [WIDTH]: `hidden` times the next norm's weight
    qkv,  # [(HEADS + 2 KV_HEADS) * DIM]
    inner,  # [INNER]
    partial,  # float32 [HEADS, SPLITS, DIM]
    partial_max,  # float32 [HEADS, SPLITS]
    partial_sum,
    attended_all,  # float32 [PROGRAMS, HEADS * DIM]
    sums,  # float32 [PROGRAMS]: parts of the sum of `hidden`'s squares
    arrived,  # int32 [2], zero before and after
    eps,
    scaling,
    layer_stride,  # of keys and values
    slot_stride,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    QKV_WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    ATTENDED: tl.constexpr = HEADS * DIM
    PADDED_HEADS: tl.constexpr = triton.next_power_of_2(HEADS)
    # Rows of each product for a program.
    QKV_EACH: tl.constexpr = triton.cdiv(QKV_WIDTH, PROGRAMS)
    WIDTH_EACH: tl.constexpr = triton.cdiv(WIDTH, PROGRAMS)
    INNER_EACH: tl.constexpr = triton.cdiv(INNER, PROGRAMS)
    QKV_TILES: tl.constexpr = triton.cdiv(QKV_EACH, ROWS)
    INNER_TILES: tl.constexpr = triton.cdiv(INNER_EACH, ROWS)
    EARLY_TILES: tl.constexpr = min(2, INNER_TILES)
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, CHUNK))
    ATTENDED_CHUNKS: tl.constexpr = PADDED_HEADS * DIM // CHUNK
    DOWN_TILES: tl.constexpr = triton.cdiv(INNER, CHUNKS * CHUNK)
    dtype = hidden.dtype.element_ty

    program = tl.program_id(0)
    slot = tl.load(slots).to(tl.int64)
    position = tl.load(positions + slot).to(tl.int32)
    mine = program * WIDTH_EACH
    mine_end = tl.minimum(mine + WIDTH_EACH, WIDTH)
    first_qkv = program * QKV_EACH
    qkv_end = tl.minimum(first_qkv + QKV_EACH, QKV_WIDTH)
    first_inner = program * INNER_EACH
    inner_end = tl.minimum(first_inner + INNER_EACH, INNER)
    rows = tl.arange(0, ROWS)

    # Blocks of positions go round the programs of a KV head.
    kv_head = program % KV_HEADS
    split = program // KV_HEADS
    blocks = position // BLOCK + 1
    active = tl.minimum(SPLITS, blocks)
    offs_h = tl.arange(0, HALF)
    offs_d = tl.arange(0, DIM)
    heads = tl.arange(0, TILE)
    is_head = heads < GROUP
    turn = tl.minimum(position, CAPACITY - 1) * DIM + offs_h
    turn_cos = tl.load(cos + turn)[None, :].to(tl.float32)
    turn_sin = tl.load(sin + turn)[None, :].to(tl.float32)

    cache = slot * slot_stride + kv_head * CAPACITY * DIM
    meetings = 0
    own_attended = attended_all + program * ATTENDED
    own = mine + rows
    is_own = own < mine_end
    new = tl.load(embedding + tl.load(token) * WIDTH + own, mask=is_own, other=0.0)
    norm = _tensor(embedding, table, 0, FIRST_NORM)
    _put_hidden(hidden, scaled, norm, sums, new, mine, mine_end, program, ROWS)
    _arrive(arrived)
    w = _tensor(embedding, table, 0, QKV)
    ahead = _tiles(w, first_qkv, qkv_end, WIDTH, CHUNKS, ROWS, 0, QKV_TILES)
    meetings += PROGRAMS
    _wait(arrived, meetings)

    for layer in range(LAYERS):
        x = _vector(scaled, 0, WIDTH, CHUNKS, ROWS)
        scale = _norm_scale(sums, eps, WIDTH, PROGRAMS, CHUNKS, ROWS)
        for tile in tl.static_range(QKV_TILES):
            row = first_qkv + tile * ROWS + rows
            product = _times(ahead[tile], x) * scale
            if HAS_BIAS:
                bias = _tensor(embedding, table, layer, QKV_BIAS)
                product += tl.load(bias + row, mask=row < qkv_end, other=0.0).to(tl.float32)
            _put(qkv, row, product.to(dtype), qkv_end)
        _arrive(arrived)

        offs_j = split * BLOCK + tl.arange(0, BLOCK)
        is_cached = ((offs_j < position) & (split < SPLITS))[:, None]
        k1 = tl.load(keys + cache + offs_j[:, None] * DIM + offs_h[None, :], mask=is_cached, other=0.0)
        k2 = tl.load(keys + cache + offs_j[:, None] * DIM + HALF + offs_h[None, :], mask=is_cached, other=0.0)
        v = tl.load(values + cache + offs_j[:, None] * DIM + offs_d[None, :], mask=is_cached, other=0.0)
        meetings += PROGRAMS
        _wait(arrived, meetings)

        if split < active:
            query = qkv + (kv_head * GROUP + heads[:, None]) * DIM + offs_h[None, :]
            q1 = tl.load(query, mask=is_head[:, None], other=0.0).to(tl.float32)
            q2 = tl.load(query + HALF, mask=is_head[:, None], other=0.0).to(tl.float32)
            if HAS_QK_NORM:
                q1, q2 = head_norm(q1, q2, _tensor(embedding, table, layer, Q_NORM), offs_h, eps, HALF, dtype)
            q1, q2 = rotate(q1, q2, turn_cos, turn_sin, dtype)
            largest = tl.full((TILE,), float("-inf"), dtype=tl.float32)
            weight = tl.zeros((TILE,), dtype=tl.float32)
            total = tl.zeros((TILE, DIM), dtype=tl.float32)
            for block in range(split, blocks, active):
                offs_j = block * BLOCK + tl.arange(0, BLOCK)
                if block == blocks - 1:
                    fresh = qkv + (HEADS + kv_head) * DIM
                    n1 = tl.load(fresh + offs_h)[None, :].to(tl.float32)
                    n2 = tl.load(fresh + HALF + offs_h)[None, :].to(tl.float32)
                    if HAS_QK_NORM:
                        n1, n2 = head_norm(n1, n2, _tensor(embedding, table, layer, K_NORM), offs_h, eps, HALF, dtype)
                    n1, n2 = rotate(n1, n2, turn_cos, turn_sin, dtype)
                    nv = tl.load(fresh + KV_HEADS * DIM + offs_d)[None, :]
                    place = cache + position * DIM + offs_h[None, :]
                    tl.store(keys + place, n1, mask=position < CAPACITY)
                    tl.store(keys + place + HALF, n2, mask=position < CAPACITY)
                    tl.store(values + cache + position * DIM + offs_d[None, :], nv, mask=position < CAPACITY)
                    is_new = (offs_j == position)[:, None]
                    k1 = tl.where(is_new, n1, k1)
                    k2 = tl.where(is_new, n2, k2)
                    v = tl.where(is_new, nv, v)
                scores = tl.dot(q1, tl.trans(k1))
                scores = tl.dot(q2, tl.trans(k2), scores)
                scores = tl.where((offs_j <= position)[None, :], scores * scaling, float("-inf"))
                # Every block has a position that may be looked at.
                top = tl.maximum(largest, tl.max(scores, axis=1))
                weights = tl.exp(scores - top[:, None])
                before = tl.exp(largest - top)
                weight = weight * before + tl.sum(weights, axis=1)
                total = total * before[:, None] + tl.dot(weights.to(dtype), v)
                largest = top
                offs_j += active * BLOCK
                is_cached = (offs_j < position)[:, None]
                k1 = tl.load(keys + cache + offs_j[:, None] * DIM + offs_h[None, :], mask=is_cached, other=0.0)
                k2 = tl.load(keys + cache + offs_j[:, None] * DIM + HALF + offs_h[None, :], mask=is_cached, other=0.0)
                v = tl.load(values + cache + offs_j[:, None] * DIM + offs_d[None, :], mask=is_cached, other=0.0)
            place = (kv_head * GROUP + heads) * SPLITS + split
            tl.store(partial_max + place, largest, mask=is_head)
            tl.store(partial_sum + place, weight, mask=is_head)
            tl.store(partial + place[:, None] * DIM + offs_d[None, :], total, mask=is_head[:, None])
        _arrive(arrived)

        w = _tensor(embedding, table, layer, OUTPUT)
        output = _weights(w, mine, mine_end, 0, ATTENDED, ATTENDED_CHUNKS, ROWS)
        # Memory has nothing else to do meanwhile. More than this would not fit the registers beside the splits.
        w = _tensor(embedding, table, layer, GATE_UP)
        gates = _tiles(w, first_inner, inner_end, WIDTH, CHUNKS, ROWS, 0, EARLY_TILES)
        ups = _tiles(w + INNER * WIDTH, first_inner, inner_end, WIDTH, CHUNKS, ROWS, 0, EARLY_TILES)
        meetings += PROGRAMS
        _wait(arrived, meetings)

        # By way of memory of this program's own: there each thread finds what its part of the weights needs.
        attended = _added_up(partial, partial_max, partial_sum, active, HEADS, PADDED_HEADS, DIM, SPLITS)
        at = tl.arange(0, PADDED_HEADS)[:, None] * DIM + offs_d[None, :]
        tl.store(own_attended + at, attended, mask=at < ATTENDED)
        tl.debug_barrier()
        x = _vector(own_attended, 0, ATTENDED, ATTENDED_CHUNKS, ROWS)
        new = _times(output, x).to(dtype) + tl.load(hidden + own, mask=is_own, other=0.0)
        norm = _tensor(embedding, table, layer, SECOND_NORM)
        _put_hidden(hidden, scaled, norm, sums, new, mine, mine_end, program, ROWS)
        _arrive(arrived)

        w = _tensor(embedding, table, layer, GATE_UP)
        gates = gates + _tiles(w, first_inner, inner_end, WIDTH, CHUNKS, ROWS, EARLY_TILES, INNER_TILES)
        ups = ups + _tiles(w + INNER * WIDTH, first_inner, inner_end, WIDTH, CHUNKS, ROWS, EARLY_TILES, INNER_TILES)
        meetings += PROGRAMS
        _wait(arrived, meetings)

        x = _vector(scaled, 0, WIDTH, CHUNKS, ROWS)
        scale = _norm_scale(sums, eps, WIDTH, PROGRAMS, CHUNKS, ROWS)
        for tile in tl.static_range(INNER_TILES):
            row = first_inner + tile * ROWS + rows
            gate = _times(gates[tile], x) * scale
            value = gate / (1.0 + tl.exp(-gate)) * (_times(ups[tile], x) * scale)
            _put(inner, row, value.to(dtype), inner_end)
        _arrive(arrived)

        w = _tensor(embedding, table, layer, DOWN)
        downs = ()
        for tile in tl.static_range(DOWN_TILES):
            downs = downs + (_weights(w, mine, mine_end, tile * CHUNKS * CHUNK, INNER, CHUNKS, ROWS),)  # noqa: RUF005
        meetings += PROGRAMS
        _wait(arrived, meetings)

        product = tl.zeros((ROWS,), dtype=tl.float32)
        for tile in tl.static_range(DOWN_TILES):
            product += _times(downs[tile], _vector(inner, tile * CHUNKS * CHUNK, INNER, CHUNKS, ROWS).to(tl.float32))
        new = product.to(dtype) + tl.load(hidden + own, mask=is_own, other=0.0)
        following = min(layer + 1, LAYERS - 1)
        norm = _tensor(embedding, table, following, FIRST_NORM)
        _put_hidden(hidden, scaled, norm, sums, new, mine, mine_end, program, ROWS)
        _arrive(arrived)

        cache += layer_stride
        # The last layer reads its own again.
        w = _tensor(embedding, table, following, QKV)
        ahead = _tiles(w, first_qkv, qkv_end, WIDTH, CHUNKS, ROWS, 0, QKV_TILES)
        meetings += PROGRAMS
        _wait(arrived, meetings)

    # Whoever leaves last has seen all others past the last meeting.
    if tl.atomic_add(arrived + 1, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(arrived, 0)
        tl.store(arrived + 1, 0)


@triton.jit
def _added_up(
    partial, partial_max, partial_sum, active,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """float32 `[PADDED_HEADS, DIM]`: the splits of all heads, in their order."""
    HEADS_AT: tl.constexpr = 0 if ROWS_FIRST else 1
    head = tl.expand_dims(tl.arange(0, PADDED_HEADS), 1 - HEADS_AT)
    offs_d = tl.arange(0, DIM)
    largest = tl.full((PADDED_HEADS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((PADDED_HEADS,), dtype=tl.float32)
    total = tl.zeros((PADDED_HEADS, DIM), dtype=tl.float32)
    for start in range(0, active, SPLITS_AT_ONCE):
        part = start + tl.expand_dims(tl.arange(0, SPLITS_AT_ONCE), HEADS_AT)
        is_part = (part < active) & (head < HEADS)
        place = head * SPLITS + part
        # A head of the padding gets numbers, not NaN, and meets no weight.
        these = tl.load(partial_max + place, mask=is_part, other=-1e30)
        counted = tl.load(partial_sum + place, mask=is_part, other=0.0)
        rows_in = tl.load(
            partial + place[:, :, None] * DIM + offs_d[None, None, :], mask=is_part[:, :, None], other=0.0
        )
        top = tl.maximum(largest, tl.max(these, axis=1 - HEADS_AT))
        factor = tl.exp(these - tl.expand_dims(top, 1 - HEADS_AT))
        before = tl.exp(largest - top)
        weight = weight * before + tl.sum(counted * factor, axis=1 - HEADS_AT)
        total = total * before[:, None] + tl.sum(rows_in * factor[:, :, None], axis=1 - HEADS_AT)
        largest = top
    return total / tl.maximum(weight, 1e-30)[:, None]
