"""What a slice will take, before a byte of it is read: weights, keys and values, graphs, workspace.

A device that is too small says so at once, with the numbers and the largest context that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from peerllm.engine.machine import host_memory
from peerllm.engine.runner import BUCKETS
from peerllm.engine.slice import SliceShape, read_config
from peerllm.models.allowlist import ModelShape, check_folder
from peerllm.models.drafts import is_draft, read_draft
from peerllm.models.layout import layer_tensors, range_tensors, size_bytes
from peerllm.protocol import limits
from peerllm.protocol.errors import NotEnoughMemory
from peerllm.protocol.identity import INT8, LayerRange
from peerllm.protocol.tensors import DTYPE_BYTES

_GRAPH_BYTES = 64 * limits.MIB
"""Of the graphs of one model: kernels' nodes and what the driver keeps for them. Measured 30 to 50 MiB."""
_CUDA_CONTEXT_BYTES = 408 * limits.MIB
"""torch's and cuBLAS's workspaces, the kernels' code and the allocator's rounding, once for a process: what an H200 had
less than before, beyond what the rest of the plan says."""
_HOST_WORKSPACE_BYTES = 128 * limits.MIB
_MIB = limits.MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes on one device."""

    weights: int
    cache_per_position: int
    context: int
    slots: int
    workspace: int
    draft: int
    """Everything of a draft model on the same device."""
    free: int
    """0 where it is not known."""

    @property
    def cache(self) -> int:
        return self.cache_per_position * (self.context + limits.MAX_CANDIDATES + 1) * self.slots

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.draft

    @property
    def fits(self) -> bool:
        return self.free == 0 or self.total <= self.free

    def largest_context(self) -> int:
        """Positions for which there is room; 0 when the weights alone are too large."""
        if self.free == 0:
            return limits.MAX_CONTEXT
        rest = self.free - self.weights - self.workspace - self.draft
        positions = rest // (self.cache_per_position * self.slots) - limits.MAX_CANDIDATES - 1
        return max(0, min(positions, limits.MAX_CONTEXT))

    def words(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.cache, "workspace": self.workspace}
        if self.draft:
            parts["draft model"] = self.draft
        listed = ", ".join(f"{name} {size // _MIB} MiB" for name, size in parts.items())
        return f"{self.total // _MIB} MiB are needed ({listed}); {self.free // _MIB} MiB are free"


def plan_slice(
    folder: Path | str,
    layers: LayerRange,
    *,
    dtype: str,
    weights: str,
    context: int,
    slots: int,
    free: int,
    is_gpu: bool,
    draft: int = 0,
) -> Plan:
    """The plan of one slice of the model in `folder`, from its config alone."""
    shape = check_folder(Path(folder))
    size = size_bytes(range_tensors(shape, layers), dtype)
    if weights == INT8:
        size -= int8_saving(shape, len(layers), dtype)
    per_position = 2 * len(layers) * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
    # The rotary tables stand for the same positions.
    per_position += -(-2 * shape.head_dim * DTYPE_BYTES[dtype] // slots)
    return Plan(
        weights=size,
        cache_per_position=per_position,
        context=context,
        slots=slots,
        workspace=workspace_bytes(shape, layers, dtype, is_gpu=is_gpu),
        draft=draft,
        free=free,
    )


def plan_draft(folder: Path | str, *, dtype: str, context: int, slots: int, is_gpu: bool) -> int:
    """Bytes of a whole draft model with its caches."""
    shape = SliceShape.of(read_config(folder))
    plan = plan_slice(
        folder,
        LayerRange(0, shape.layers),
        dtype=dtype,
        weights="",
        context=context,
        slots=slots,
        free=0,
        is_gpu=is_gpu,
    )
    total = plan.total - (_CUDA_CONTEXT_BYTES if is_gpu else 0)
    if is_draft(folder):
        # The embedding is the target's own, on the same device; the head has some of the tokens.
        row = shape.width * DTYPE_BYTES[dtype]
        kept = len(read_draft(folder).tokens)
        total += kept * row - shape.vocabulary * row * (1 if shape.is_tied else 2)
    return total


def int8_saving(shape: ModelShape, layers: int, dtype: str) -> int:
    """Bytes that int8 takes off the products of so many layers; each channel gets a float32 scale."""
    products: dict[str, tuple[int, ...]] = {
        name: size for name, size in layer_tensors(shape, 0).items() if len(size) == 2
    }
    each = size_bytes(products, dtype)
    small = each // DTYPE_BYTES[dtype] + 4 * sum(size[0] for size in products.values())
    return layers * (each - small)


def workspace_bytes(shape: ModelShape, layers: LayerRange, dtype: str, *, is_gpu: bool) -> int:
    """Static buffers of a forward and, on a GPU, graphs and the libraries' own."""
    rows = max(*BUCKETS, limits.PREFILL_CHUNK_ROWS)
    queries = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width = 5 * shape.hidden_size + 2 * queries + 3 * shape.intermediate_size
    size = rows * width * DTYPE_BYTES[dtype]
    if layers.last >= shape.layers:
        size += max(BUCKETS) * shape.vocabulary * (DTYPE_BYTES[dtype] + 4)
    return size + (_GRAPH_BYTES + _CUDA_CONTEXT_BYTES if is_gpu else _HOST_WORKSPACE_BYTES)


def require(plan: Plan, device: torch.device | str) -> None:
    """Raises NotEnoughMemory, with the numbers and what would fit, unless the plan does."""
    if plan.fits:
        return
    largest = plan.largest_context()
    advice = f"a context of {largest} would fit" if largest > 0 else "hold fewer layers, or run them with int8 weights"
    raise NotEnoughMemory(f"{device}: {plan.words()}; {advice}")


def free_memory(device: torch.device) -> int:
    """Bytes; 0 where it is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[0]


def plan_for(
    folder: Path | str,
    layers: LayerRange,
    draft: str,
    dtype: str,
    weights: str,
    slots: int,
    device: torch.device,
    draft_device: torch.device | str | None,
    context: int,
) -> Plan:
    """The plan of a slice and of the draft that `draft` names, where both are on `device`."""
    is_gpu = device.type == "cuda"
    free = free_memory(device)
    if not is_gpu:
        # The kernel gives a cache's pages as they are written, and one sequence is the rule.
        slots = 1
    drafts = 0
    kind, _, path = draft.partition(":")
    if kind == "model" and path and torch.device(draft_device or device) == device:
        drafts = plan_draft(path, dtype=dtype, context=context, slots=slots, is_gpu=is_gpu)
    return plan_slice(
        folder,
        layers,
        dtype=dtype,
        weights=weights,
        context=context,
        slots=slots,
        free=free,
        is_gpu=is_gpu,
        draft=drafts,
    )
