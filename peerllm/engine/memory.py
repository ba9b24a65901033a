"""What a slice will take, before a byte of it is read: weights, keys and values, graphs, workspace.

A device that is too small says so at once, with the numbers and the largest context that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peerllm.engine.machine import host_memory, indexed
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
    is_for_draft: bool = False
    """Whether all of it is a draft model's, alone on its device."""

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
        what = " for the draft model" if self.is_for_draft else ""
        return f"{self.total // _MIB} MiB are needed{what} ({listed}); {self.free // _MIB} MiB are free"


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
        workspace=workspace_bytes(shape, layers, dtype, is_gpu=is_gpu, weights=weights),
        draft=draft,
        free=free,
    )


def plan_draft(
    folder: Path | str, *, dtype: str, context: int, slots: int, is_gpu: bool, is_embedding_shared: bool = True
) -> int:
    """Bytes of a whole draft model with its caches, beside a slice that counts what a device needs once.

    Args:
        is_embedding_shared: whether a draft that was made for its target finds the target's embedding on its device.
    """
    alone = plan_draft_alone(folder, dtype=dtype, context=context, slots=slots, free=0, is_gpu=is_gpu)
    total = alone.total - (_CUDA_CONTEXT_BYTES if is_gpu else 0)
    if is_embedding_shared and is_draft(folder):
        shape = SliceShape.of(read_config(folder))
        total -= shape.vocabulary * shape.width * DTYPE_BYTES[dtype]
    return total


def plan_draft_alone(folder: Path | str, *, dtype: str, context: int, slots: int, free: int, is_gpu: bool) -> Plan:
    """The plan of a draft model on a device that has nothing of the slice: an embedding is its own there."""
    shape = SliceShape.of(read_config(folder))
    plan = plan_slice(
        folder,
        LayerRange(0, shape.layers),
        dtype=dtype,
        weights="",
        context=context,
        slots=slots,
        free=free,
        is_gpu=is_gpu,
    )
    size = plan.weights
    if is_draft(folder):
        # The head has some of the tokens, also where the whole model's is its embedding.
        row = shape.width * DTYPE_BYTES[dtype]
        size += len(read_draft(folder).tokens) * row - (0 if shape.is_tied else shape.vocabulary * row)
    return replace(plan, weights=size, is_for_draft=True)


def int8_saving(shape: ModelShape, layers: int, dtype: str) -> int:
    """Bytes that int8 takes off the products of so many layers; each channel gets a float32 scale."""
    products: dict[str, tuple[int, ...]] = {
        name: size for name, size in layer_tensors(shape, 0).items() if len(size) == 2
    }
    each = size_bytes(products, dtype)
    small = each // DTYPE_BYTES[dtype] + 4 * sum(size[0] for size in products.values())
    return layers * (each - small)


def workspace_bytes(shape: ModelShape, layers: LayerRange, dtype: str, *, is_gpu: bool, weights: str = "") -> int:
    """Static buffers of a forward and, on a GPU, graphs and the libraries' own."""
    rows = max(*BUCKETS, limits.PREFILL_CHUNK_ROWS)
    queries = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width = 5 * shape.hidden_size + 2 * queries + 3 * shape.intermediate_size
    size = rows * width * DTYPE_BYTES[dtype]
    if layers.last >= shape.layers:
        size += max(BUCKETS) * shape.vocabulary * (DTYPE_BYTES[dtype] + 4)
    if weights == INT8:
        # Wide blocks widen one weight at a time, and narrow ones split their rows into planes.
        size += max(2 * shape.intermediate_size, queries) * shape.hidden_size * DTYPE_BYTES[dtype]
        size += 3 * rows * max(shape.intermediate_size, shape.hidden_size, queries)
    return size + (_GRAPH_BYTES + _CUDA_CONTEXT_BYTES if is_gpu else _HOST_WORKSPACE_BYTES)


def require(plan: Plan, device: torch.device | str) -> None:
    """Raises NotEnoughMemory, with the numbers and what would fit, unless the plan does."""
    if plan.fits:
        return
    largest = plan.largest_context()
    if largest > 0:
        advice = f"a context of {largest} would fit"
    elif plan.is_for_draft:
        advice = "draft on another device, or with a smaller model"
    else:
        advice = "hold fewer layers, or run them with int8 weights"
    raise NotEnoughMemory(f"{device}: {plan.words()}; {advice}")


def free_memory(device: torch.device) -> int:
    """Bytes; 0 where it is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[0]


def plans_for(
    folder: Path | str,
    ranges: Sequence[LayerRange],
    places: Sequence[torch.device],
    *,
    draft: str,
    draft_device: torch.device,
    dtype: str,
    weights: str,
    slots: int,
    context: int,
) -> list[tuple[torch.device, Plan]]:
    """What each device is to hold: the slice's parts in order, then a draft that is on none of their devices.

    Args:
        ranges: of the slice's parts, one for each of `places`; a place too many holds nothing.
        draft: `none`, `ngram` or `model:PATH`.
        slots: sequences at once, on a GPU.
        context: positions of a sequence.
    """
    kind, _, path = draft.partition(":")
    drafting = indexed(draft_device) if kind == "model" and path else None
    plans: list[tuple[torch.device, Plan]] = []
    # A device that is named again has what the parts before leave of it.
    used: dict[torch.device, int] = {}
    for layers, place in zip(ranges, places, strict=False):
        counted = _slots_on(place, slots)
        is_gpu = place.type == "cuda"
        before = used.get(indexed(place), 0)
        drafts = 0
        if indexed(place) == drafting and not before:
            drafts = plan_draft(
                path,
                dtype=dtype,
                context=context,
                slots=counted,
                is_gpu=is_gpu,
                is_embedding_shared=indexed(places[0]) == drafting,
            )
        plan = plan_slice(
            folder,
            layers,
            dtype=dtype,
            weights=weights,
            context=context,
            slots=counted,
            free=max(0, free_memory(place) - before),
            is_gpu=is_gpu,
            draft=drafts,
        )
        used[indexed(place)] = before + plan.total
        plans.append((place, plan))
    if drafting is not None and all(indexed(place) != drafting for place, _ in plans):
        plan = plan_draft_alone(
            path,
            dtype=dtype,
            context=context,
            slots=_slots_on(drafting, slots),
            free=free_memory(drafting),
            is_gpu=drafting.type == "cuda",
        )
        plans.append((drafting, plan))
    return plans


def _slots_on(device: torch.device, slots: int) -> int:
    """The kernel gives a cache's pages in the host's memory as they are written, and one sequence is the rule."""
    return slots if device.type == "cuda" else 1
