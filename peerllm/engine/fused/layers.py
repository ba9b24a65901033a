"""A slice's layers by the fused kernels, on static buffers: what graphs capture.

Blocks of up to `NARROW` rows: five kernels a layer. Wider blocks, and prefill: the library's matrix products with
fused row-wise kernels between them. The joined weights are the modules' own memory: after `FusedSlice` is built the
modules' parameters are views into them, and still compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from peerllm.engine.cache import KvCache
from peerllm.engine.fused import attention, int8_matmul, matmul, rows, shared_memory
from peerllm.engine.fused.stepping import OneKernelStep, supports_one_kernel
from peerllm.engine.fused.tilings import (
    INT8_PARTS,
    NARROW,
    TILINGS,
    attention_splits,
    default_tiling,
    int8_tiling,
)
from peerllm.engine.int8 import is_quantised
from peerllm.engine.slice import ModelSlice

_NARROW_INT8 = 128
"""The library has no product of int8 weights with float16 rows: ours serves up to so many, and wider blocks widen the
weights first."""
_TILE = 16
_MOST_PARTS = 8
_SHORT = 65
"""Rows of the largest block that is judged; chunks of a prompt have more."""
_MOST_DEPENDENT_BYTES = 64 << 20
"""Layers larger than this gain nothing from dependent launch: measured 2 percent slower with it."""


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Weight:
    """A product's weight `[out, in]`; with `scales` it is int8, one scale for each row."""

    values: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def unquantised(self, room: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In `dtype`; int8 goes into `room`, which the next call overwrites."""
        if self.scales is None:
            return self.values
        out = room[: self.values.numel()].view(self.values.shape)
        # Not after the product: there, sums of int8 times hidden states pass float16's range.
        return out.copy_(self.values).mul_(self.scales[:, None].to(dtype))


@dataclass(slots=True)
class Joined:
    """One layer's weights as the kernels take them."""

    qkv: _Weight
    output: _Weight
    gate_up: _Weight
    down: _Weight
    first_norm: torch.Tensor
    second_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def _join(layer: Any) -> Joined:
    attention_module, mlp = layer.self_attn, layer.mlp
    has_qk_norm = hasattr(attention_module, "q_norm")
    return Joined(
        qkv=_joined([attention_module.q_proj, attention_module.k_proj, attention_module.v_proj]),
        output=_joined([attention_module.o_proj]),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_joined([mlp.down_proj]),
        first_norm=layer.input_layernorm.weight.data,
        second_norm=layer.post_attention_layernorm.weight.data,
        q_norm=attention_module.q_norm.weight.data if has_qk_norm else None,
        k_norm=attention_module.k_norm.weight.data if has_qk_norm else None,
    )


def _joined(modules: list[Any]) -> _Weight:
    """One tensor of each kind of the modules' parameters, which become views of it: nothing is held twice."""
    found: dict[str, torch.Tensor | None] = {}
    for name in ("weight", "bias", "scales"):
        if getattr(modules[0], name, None) is None:
            found[name] = None
            continue
        joined = torch.cat([getattr(module, name).data for module in modules])
        start = 0
        for module in modules:
            size = getattr(module, name).shape[0]
            setattr(module, name, nn.Parameter(joined[start : start + size], requires_grad=False))
            start += size
        found[name] = joined
    weight = found["weight"]
    if weight is None:
        raise ValueError("a product without a weight")
    return _Weight(weight, found["bias"], found["scales"])


class FusedSlice:
    """`part`'s layers over `cache`, for blocks of at most `max_rows` rows in all.

    Args:
        max_batch: sequences in one forward.
        max_rows: rows of all sequences of one forward together.
        is_dependent: programmatic dependent launch, on sm_90 and later.
        programs: for a draft, the device's multiprocessors: one row then goes through one kernel where the model is
            small enough; 0: never. A row's last bits differ from those that it has in a block.
    """

    is_bound_to_slot = False

    def __init__(
        self,
        part: ModelSlice,
        cache: KvCache,
        *,
        max_rows: int,
        max_batch: int = 1,
        is_dependent: bool = False,
        programs: int = 0,
    ) -> None:
        self.part = part
        self.cache = cache
        layer_bytes = sum(each.numel() * each.element_size() for each in part.layers[0].parameters())
        self.is_dependent = is_dependent and layer_bytes <= _MOST_DEPENDENT_BYTES
        shape = part.shape
        self._layers = [_join(layer) for layer in part.layers]
        self._eps = float(part.config.rms_norm_eps)
        dtype, device = part.dtype, part.device
        self._is_fp32 = dtype == torch.float32
        self._qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self._sums_stride = _power_of_two(max(16, programs, -(-shape.width // 8)))

        def buffer(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=of, device=device)

        self.hidden = buffer(max_rows, shape.width)
        self.slots = buffer(max_batch, of=torch.int32)
        self.tokens = buffer(max_rows, of=torch.int64)
        self._source = buffer(max_rows, shape.width) if not part.takes_tokens else None
        self._qkv = buffer(max_rows, self._qkv_width)
        self._attended = buffer(max_rows, shape.heads * shape.head_dim)
        self._inner = buffer(max_rows, shape.intermediate)
        self._normed = buffer(max_rows, shape.width)
        self._delta = buffer(max_rows, shape.width)
        self._gate_up = buffer(max_rows, 2 * shape.intermediate)
        has_int8 = is_quantised(part)
        # Wide blocks multiply by the library's products, which take no int8: one weight at a time is widened.
        largest = max(shape.intermediate * 2, self._qkv_width) * shape.width if has_int8 else 0
        self._unquantised = buffer(largest)
        self._narrow = min(max_rows, _NARROW_INT8) if has_int8 else NARROW
        self._shared = shared_memory(device)
        # float32 has more digits than two planes.
        self._plane_count = 3 if self._is_fp32 else 2
        depth = max(shape.intermediate, shape.width, shape.heads * shape.head_dim) if has_int8 else 0
        self._planes = buffer(self._plane_count, _NARROW_INT8 * depth, of=torch.int8)
        self._steps = buffer(_NARROW_INT8, of=torch.float32)
        self._sums = [buffer(max(NARROW, self._narrow), self._sums_stride, of=torch.float32) for _ in range(2)]
        self._sum_count = 1
        self._split, self._splits = attention_splits(cache.capacity, shape.head_dim)
        self._attention_warps = 4
        # Batches of up to NARROW rows together, or of one row each.
        parts = max(min(NARROW, max_rows), max_batch) * shape.heads * self._splits
        partial_rows = max(_MOST_PARTS * NARROW, INT8_PARTS * _NARROW_INT8 if has_int8 else 0)
        self._product_partial = buffer(partial_rows, max(shape.width, self._qkv_width) + 128, of=torch.float32)
        self._product_arrived = buffer(max(shape.width, self._qkv_width), of=torch.int32)
        self._partial = buffer(parts, shape.head_dim, of=torch.float32)
        self._partial_max = buffer(parts, of=torch.float32)
        self._partial_sum = buffer(parts, of=torch.float32)
        self._one_kernel: OneKernelStep | None = None
        if programs and supports_one_kernel(part, self._layers, programs):
            step = OneKernelStep(part, cache, self._layers, programs)
            if step.works(self.tokens, self.slots, self.hidden, self._qkv, self._sums[0]):
                self._one_kernel = step

    @property
    def source(self) -> torch.Tensor:
        """Where hidden states `[max_rows, width]` are put before `forward`, if the slice takes no tokens."""
        if self._source is None:
            raise RuntimeError("this slice takes tokens")
        return self._source

    def forward(self, rows_each: int, batch: int = 1) -> torch.Tensor:
        """Hidden states `[batch * rows_each, width]` (a static buffer) of what stands in `tokens` or `source`, at the
        positions of `slots`. Positions are not advanced."""
        count = rows_each * batch
        if count == 1 and self._one_kernel is not None:
            self._one_kernel.run(self.tokens, self.slots, self.hidden, self._qkv, self._sums[0])
            self._sum_count = self._one_kernel.programs
            return self.hidden[:1]
        is_narrow = count <= self._narrow
        self._take_in(count)
        for index, layer in enumerate(self._layers):
            if is_narrow:
                self._narrow_layer(index, layer, rows_each, batch)
            else:
                is_last = index == len(self._layers) - 1
                following = None if is_last else self._layers[index + 1].first_norm
                self._wide_layer(index, layer, following, rows_each, batch)
        return self.hidden[:count]

    def logits(self, count: int, out: torch.Tensor) -> torch.Tensor:
        """Norm and head over the rows that `forward` left; into `out` `[>= count, vocabulary]`."""
        norm, head = self.part.norm, self.part.head
        if norm is None or head is None:
            raise RuntimeError("only the last slice has a head")
        if count <= NARROW:
            self._matmul(self.hidden, _Weight(head.weight), out, count, norm=norm.weight, sums_in=0)
        else:
            self._add_and_norm(count, None, norm.weight)
            torch.mm(self._normed[:count], head.weight.t(), out=out[:count])
        return out[:count]

    # --- Pieces -----------------------------------------------------------------------------------------------------

    def _take_in(self, count: int) -> None:
        width = self.part.shape.width
        embed = self.part.embed if self.part.takes_tokens else None
        source = self._source if embed is None else embed.weight
        # Wide blocks use no sums; all their rows' land in row 0 of nothing that is read.
        sums = self._sums[0] if count <= self._narrow else self._delta.view(torch.float32)
        stride = self._sums_stride if count <= self._narrow else 1
        rows.take_in[(count,)](
            source, self.tokens, self.hidden, sums,
            WIDTH=width, PADDED=_power_of_two(width), SUMS_STRIDE=stride,
            IS_EMBEDDING=embed is not None, IS_DEPENDENT=self.is_dependent,
            launch_pdl=self.is_dependent,
        )  # fmt: skip
        self._sum_count = 1

    def _narrow_layer(self, index: int, layer: Joined, rows_each: int, batch: int) -> None:
        count = rows_each * batch
        self._matmul(self.hidden, layer.qkv, self._qkv, count, norm=layer.first_norm, sums_in=0)
        self._attend(index, layer, rows_each, batch)
        self._matmul(self._attended, layer.output, self.hidden, count, sums_out=1)
        self._matmul(self.hidden, layer.gate_up, self._inner, count, norm=layer.second_norm, sums_in=1, is_gated=True)
        self._matmul(self._inner, layer.down, self.hidden, count, sums_out=0)

    def _wide_layer(
        self, index: int, layer: Joined, following: torch.Tensor | None, rows_each: int, batch: int
    ) -> None:
        count = rows_each * batch
        if index == 0:
            self._add_and_norm(count, None, layer.first_norm)
        normed, delta, inner = self._normed[:count], self._delta[:count], self._inner[:count]
        self._wide_matmul(normed, layer.qkv, self._qkv[:count])
        self._attend(index, layer, rows_each, batch)
        self._wide_matmul(self._attended[:count], layer.output, delta)
        self._add_and_norm(count, delta, layer.second_norm)
        self._wide_matmul(normed, layer.gate_up, self._gate_up[:count])
        width = self.part.shape.intermediate
        rows.swiglu[(count, -(-width // 1024))](
            self._gate_up, inner, INNER=width, BLOCK=1024, IS_DEPENDENT=self.is_dependent,
            launch_pdl=self.is_dependent,
        )  # fmt: skip
        self._wide_matmul(inner, layer.down, delta)
        self._add_and_norm(count, delta, following)

    def _wide_matmul(self, x: torch.Tensor, weight: _Weight, out: torch.Tensor) -> None:
        values = weight.unquantised(self._unquantised, self.part.dtype)
        if weight.bias is None:
            torch.mm(x, values.t(), out=out)
        else:
            torch.addmm(weight.bias, x, values.t(), out=out)

    def _add_and_norm(self, count: int, delta: torch.Tensor | None, norm: torch.Tensor | None) -> None:
        width = self.part.shape.width
        rows.add_and_norm[(count,)](
            self.hidden, delta, norm, self._normed, self._eps,
            WIDTH=width, PADDED=_power_of_two(width), HAS_DELTA=delta is not None, HAS_NORM=norm is not None,
            IS_DEPENDENT=self.is_dependent, launch_pdl=self.is_dependent,
        )  # fmt: skip

    def _matmul(
        self,
        x: torch.Tensor,
        weight: _Weight,
        out: torch.Tensor,
        count: int,
        *,
        norm: torch.Tensor | None = None,
        sums_in: int | None = None,
        sums_out: int | None = None,
        is_gated: bool = False,
    ) -> None:
        if weight.scales is not None:
            self._int8_matmul(x, weight, out, count, norm=norm, sums_out=sums_out, is_gated=is_gated)
            return
        values = weight.values
        depth = values.shape[1]
        columns = values.shape[0] // 2 if is_gated else values.shape[0]
        tiling = TILINGS.get((columns, depth, is_gated)) or default_tiling(columns, depth, is_gated=is_gated)
        # A tile of both, as they are in memory.
        bytes_each = NARROW * x.element_size() + tiling.block_n * values.element_size() * (2 if is_gated else 1)
        tiling = tiling.fitted(bytes_each, self._shared)
        blocks = -(-columns // tiling.block_n)
        matmul.block_matmul[(blocks, tiling.parts)](
            x, values, weight.bias, norm,
            None if sums_in is None else self._sums[sums_in],
            None if sums_out is None else self._sums[sums_out],
            out, self._product_partial, self._product_arrived, count, columns, self._sum_count, self._eps,
            K=depth, BLOCK_M=NARROW, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
            SUMS=_power_of_two(self._sum_count), SUMS_STRIDE=self._sums_stride, PARTS=tiling.parts,
            HAS_NORM=norm is not None, HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=sums_out is not None,
            IS_GATED=is_gated, IS_FP32=self._is_fp32,
            IS_DEPENDENT=self.is_dependent, num_warps=tiling.warps, num_stages=tiling.stages,
            launch_pdl=self.is_dependent,
        )  # fmt: skip
        if sums_out is not None:
            self._sum_count = blocks

    def _int8_matmul(
        self,
        x: torch.Tensor,
        weight: _Weight,
        out: torch.Tensor,
        count: int,
        *,
        norm: torch.Tensor | None,
        sums_out: int | None,
        is_gated: bool,
    ) -> None:
        depth = weight.values.shape[1]
        columns = weight.values.shape[0] // 2 if is_gated else weight.values.shape[0]
        stride = self._planes.shape[1]
        padded = _power_of_two(depth)
        int8_matmul.split_rows[(count,)](
            x, norm, self._planes, self._steps, stride, self._eps,
            K=depth, PADDED=padded, PLANES=self._plane_count, HAS_NORM=norm is not None,
            IS_DEPENDENT=self.is_dependent, num_warps=min(16, max(4, padded // 1024)), launch_pdl=self.is_dependent,
        )  # fmt: skip
        block_m = max(NARROW, _power_of_two(count))
        tiling = int8_tiling(columns, depth, block_m, is_gated=is_gated)
        bytes_each = block_m * self._plane_count + tiling.block_n * (2 if is_gated else 1)
        tiling = tiling.fitted(bytes_each, self._shared)
        blocks = -(-columns // tiling.block_n)
        int8_matmul.int8_matmul[(blocks, tiling.parts)](
            self._planes, self._steps, weight.values, weight.scales, weight.bias,
            None if sums_out is None else self._sums[sums_out],
            out, self._product_partial, self._product_arrived, stride, count, columns,
            K=depth, BLOCK_M=block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
            SUMS_STRIDE=self._sums_stride, PARTS=tiling.parts, PLANES=self._plane_count,
            HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=sums_out is not None, IS_GATED=is_gated,
            IS_DEPENDENT=self.is_dependent, num_warps=tiling.warps, num_stages=tiling.stages,
            launch_pdl=self.is_dependent,
        )  # fmt: skip
        if sums_out is not None:
            self._sum_count = blocks

    def _attend(self, index: int, layer: Joined, rows_each: int, batch: int) -> None:
        if rows_each == 1 or rows_each * batch <= NARROW:
            self._attention(index, layer, rows_each, batch)
        else:
            self._wide_attention(index, layer, rows_each, batch)

    def _attention(self, index: int, layer: Joined, rows_each: int, batch: int) -> None:
        shape, cache = self.part.shape, self.cache
        cos, sin = self.part.rotary_table
        tiles = -(-rows_each * (shape.heads // shape.kv_heads) // _TILE)
        attention.block_attention[(self._splits, shape.kv_heads * tiles, batch)](
            self._qkv, cache.keys[index], cache.values[index], cos, sin, layer.q_norm, layer.k_norm,
            self.slots, cache.positions, self._partial, self._partial_max, self._partial_sum,
            rows_each, self._eps, shape.head_dim**-0.5,
            SLOT_STRIDE=shape.kv_heads * cache.capacity * shape.head_dim, CAPACITY=cache.capacity,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.head_dim, TILE=_TILE, SPLIT=self._split,
            SPLITS=self._splits, HAS_QK_NORM=layer.q_norm is not None, IS_FP32=self._is_fp32,
            IS_DEPENDENT=self.is_dependent, num_warps=self._attention_warps, num_stages=1,
            launch_pdl=self.is_dependent,
        )  # fmt: skip
        attention.add_up_splits[(rows_each * batch, shape.heads)](
            self._partial, self._partial_max, self._partial_sum, self.slots, cache.positions, self._attended,
            rows_each, HEADS=shape.heads, DIM=shape.head_dim, SPLIT=self._split, SPLITS=self._splits,
            CHUNK=min(32, _power_of_two(self._splits)), IS_DEPENDENT=self.is_dependent,
            num_warps=4 if self._splits > 4 else 1, launch_pdl=self.is_dependent,
        )  # fmt: skip

    def _wide_attention(self, index: int, layer: Joined, rows_each: int, batch: int) -> None:
        shape, cache = self.part.shape, self.cache
        cos, sin = self.part.rotary_table
        options = {
            "SLOT_STRIDE": shape.kv_heads * cache.capacity * shape.head_dim, "CAPACITY": cache.capacity,
            "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim,
            "IS_DEPENDENT": self.is_dependent, "launch_pdl": self.is_dependent,
        }  # fmt: skip
        attention.rotate_and_write[(rows_each * batch, shape.heads + 2 * shape.kv_heads)](
            self._qkv, cache.keys[index], cache.values[index], cos, sin, layer.q_norm, layer.k_norm,
            self.slots, cache.positions, rows_each, self._eps, HAS_QK_NORM=layer.q_norm is not None,
            num_warps=1, **options,
        )  # fmt: skip
        tile, block, warps = self._wide_tile(rows_each)
        tiles = -(-rows_each * (shape.heads // shape.kv_heads) // tile)
        attention.wide_attention[(tiles, shape.kv_heads, batch)](
            self._qkv, cache.keys[index], cache.values[index], self.slots, cache.positions, self._attended,
            rows_each, shape.head_dim**-0.5, TILE=tile, BLOCK=block, IS_FP32=self._is_fp32,
            num_warps=warps, num_stages=2, **options,
        )  # fmt: skip

    def _wide_tile(self, rows_each: int) -> tuple[int, int, int]:
        """(queries, keys, warps) of a tile of `wide_attention`: small ones where there are few rows to share out."""
        return (16, 128, 4) if rows_each <= _SHORT else (64, 64, 4)
