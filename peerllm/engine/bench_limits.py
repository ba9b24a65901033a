"""What a machine and a model allow a step: bandwidth and rate as measured, and the bytes that it has to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from peerllm.engine import memory
from peerllm.engine.slice import ModelSlice
from peerllm.protocol.identity import LayerRange

if TYPE_CHECKING:
    from peerllm.engine.bench import Timer

_COPY_MOST, _COPY_LEAST = 4 << 30, 256 << 20
"""Bytes of a copy on a GPU: some times an L2 cache at least."""


def copy_size(device: torch.device) -> int:
    """Bytes of each of the two sides of a copy that is timed: of a GPU, a quarter of what is free at most."""
    if device.type != "cuda":
        return 64 << 20
    quarter = memory.free_memory(device) // 4
    return max(_COPY_LEAST, min(_COPY_MOST, quarter - quarter % _COPY_LEAST))


def copy_bandwidth(device: torch.device, timer: Timer) -> float:
    """Bytes a second of a device-to-device copy, read and written bytes both counted."""
    size = copy_size(device)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = timer.device_milliseconds(lambda: target.copy_(source), inner=3) / 1e3
    return 2 * size / seconds


def matrix_rate(device: torch.device, dtype: torch.dtype, timer: Timer) -> float:
    """Floating-point operations a second of a large product of random matrices."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (timer.device_milliseconds(lambda: torch.mm(a, b), inner=5) / 1e3)


def step_bytes(config: Any, layers: LayerRange, dtype: torch.dtype, context: int) -> int:
    """What one block has to read: every weight once (of an embedding, only rows) and the context's keys and values."""
    part = ModelSlice(config, layers)
    count = sum(each.numel() for each in part.parameters())
    if part.embed is not None and not (part.head is not None and part.shape.is_tied):
        count -= part.embed.weight.numel()
    keys = 2 * len(layers) * part.shape.kv_heads * part.shape.head_dim * context
    return (count + keys) * dtype.itemsize
