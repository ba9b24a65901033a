"""The one-kernel step with its buffers, for small models on large GPUs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from triton import TritonError

from peerllm.engine.cache import KvCache
from peerllm.engine.fused import step
from peerllm.engine.slice import ModelSlice

if TYPE_CHECKING:
    from peerllm.engine.fused.layers import Joined

_LEAST_ROWS, _MOST_ROWS = 8, 16
"""Of a tile: a program's rows of a product as wide as the hidden states have to fit in one."""
_MOST_TILES = 6
"""Of 8 rows of 1,024 columns, of gate and as many of up: more do not fit the registers."""


class OneKernelStep:
    """All layers for one token of one sequence, on `FusedSlice`'s buffers.

    Args:
        programs: one for each multiprocessor; all run at the same time.
    """

    def __init__(self, part: ModelSlice, cache: KvCache, layers: Sequence[Joined], programs: int) -> None:
        self._part, self._cache = part, cache
        self.programs = programs
        shape, device = part.shape, part.device
        self._rows = _rows(shape.width, programs)
        # A few splits are added up faster than many; a long context needs many.
        fewest = 16 if cache.capacity <= 2048 else 32 if cache.capacity <= 8192 else 64
        self._splits = max(1, min(fewest, programs // shape.kv_heads))
        if part.embed is None:
            raise RuntimeError("a draft begins with the embedding")
        self._embedding = part.embed.weight
        self._table = torch.tensor(
            [_distances(each, self._embedding) for each in layers], dtype=torch.int64, device=device
        )
        count = shape.heads * self._splits
        self._partial = torch.zeros(count, shape.head_dim, dtype=torch.float32, device=device)
        self._partial_max = torch.zeros(count, dtype=torch.float32, device=device)
        self._partial_sum = torch.zeros(count, dtype=torch.float32, device=device)
        self._scaled = torch.zeros(shape.width, dtype=torch.float32, device=device)
        self._inner = torch.zeros(shape.intermediate, dtype=part.dtype, device=device)
        self._attended = torch.zeros(programs, shape.heads * shape.head_dim, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(2, dtype=torch.int32, device=device)
        self._has_bias = layers[0].qkv.bias is not None
        self._has_qk_norm = layers[0].q_norm is not None

    def works(
        self, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor, qkv: torch.Tensor, sums: torch.Tensor
    ) -> bool:
        """Whether the device takes it: one step of `run`'s. Where it does not, for want of registers or of room for all
        programs at once, a warning says why, and five kernels a layer do the work."""
        is_gpu = hidden.device.type == "cuda"
        try:
            # Triton launches on the current device.
            with torch.cuda.device(hidden.device) if is_gpu else contextlib.nullcontext():
                self.run(tokens, slots, hidden, qkv, sums)
            if is_gpu:
                torch.cuda.synchronize(hidden.device)
        except (RuntimeError, TritonError) as error:
            warnings.warn(f"a draft's step does not run as one kernel here: {error}", stacklevel=2)
            return False
        return True

    def run(
        self, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor, qkv: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """`hidden[0]` after the last layer, and `programs` parts of the sum of its squares in `sums[0]`."""
        part, cache, shape = self._part, self._cache, self._part.shape
        cos, sin = part.rotary_table
        step.draft_step[(self.programs,)](
            self._table, tokens, self._embedding, cos, sin, cache.keys, cache.values, slots, cache.positions,
            hidden, self._scaled, qkv, self._inner, self._partial, self._partial_max, self._partial_sum,
            self._attended, sums, self._arrived,
            float(part.config.rms_norm_eps), shape.head_dim**-0.5, cache.keys.stride(0), cache.keys.stride(1),
            LAYERS=len(part.layers), WIDTH=shape.width, INNER=shape.intermediate, HEADS=shape.heads,
            KV_HEADS=shape.kv_heads, DIM=shape.head_dim, CAPACITY=cache.capacity, SPLITS=self._splits,
            PROGRAMS=self.programs, ROWS=self._rows, HAS_BIAS=self._has_bias, HAS_QK_NORM=self._has_qk_norm,
            num_warps=8, num_stages=1, launch_cooperative_grid=True,
        )  # fmt: skip


def supports_one_kernel(part: ModelSlice, layers: Sequence[Joined], programs: int) -> bool:
    """Whether the model is a small one whose layers one kernel can hold."""
    shape = part.shape
    rows = _rows(shape.width, programs)
    depth = 1 << (shape.width - 1).bit_length()
    tiles = -(-shape.intermediate // (programs * rows))
    if part.embed is None:
        return False
    return (
        part.takes_tokens
        and part.is_last
        and part.dtype != torch.float32
        and layers[0].qkv.scales is None
        and layers[0].output.bias is None
        and rows <= _MOST_ROWS
        and shape.heads // shape.kv_heads <= _MOST_ROWS
        and shape.kv_heads <= programs <= max(256, depth)
        and (1 << (shape.heads - 1).bit_length()) * shape.head_dim >= 256
        and tiles * rows * depth <= _MOST_TILES * 8 * 1024
        # Loads of 16 bytes.
        and all(each % 8 == 0 for layer in layers for each in _distances(layer, part.embed.weight))
    )


def _rows(width: int, programs: int) -> int:
    return max(_LEAST_ROWS, 1 << (-(-width // programs) - 1).bit_length())


def _distances(layer: Joined, near: torch.Tensor) -> list[int]:
    """In elements, in the order of `step`'s columns; what a layer lacks is never read."""
    tensors = (
        layer.qkv.values, layer.qkv.bias, layer.output.values, layer.gate_up.values, layer.down.values,
        layer.first_norm, layer.second_norm, layer.q_norm, layer.k_norm,
    )  # fmt: skip
    size = near.element_size()
    return [0 if each is None else (each.data_ptr() - near.data_ptr()) // size for each in tensors]
