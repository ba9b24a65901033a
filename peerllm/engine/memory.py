"""What a slice will take, before a byte of it is read: weights, keys and values, graphs, workspace.

From config.json alone, so that it can be said before anything is fetched, and once more before anything is read: a
device that is too small says so, with the numbers and the largest context that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peerllm.engine.machine import host_memory, indexed
from peerllm.engine.plans import Plan, Plans, best_division, cache_positions, fit, split_range
from peerllm.engine.workspace import CUDA_CONTEXT_BYTES, path_of, workspace_bytes
from peerllm.models.allowlist import ModelShape, read_shape
from peerllm.models.drafts import is_draft, read_draft
from peerllm.models.layout import layer_tensors, range_tensors, size_bytes
from peerllm.protocol import limits
from peerllm.protocol.errors import NotEnoughMemory
from peerllm.protocol.identity import INT8, UNQUANTISED, LayerRange
from peerllm.protocol.tensors import DTYPE_BYTES

_SPARE = 32
"""What is free changes until the layers are loaded: a context that is chosen long before leaves this part of it."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a peer is going to load its layers."""

    context: int
    ranges: list[LayerRange]
    """Of the slice's parts, one for each device that gets one."""
    slots: int
    devices: Plans
    is_embedding_apart: bool
    """The embedding stays in the host's memory."""

    def words(self) -> list[str]:
        """A line for each device."""
        return [f"{place}: {plan.words()}" for place, plan in self.devices]


def plan_load(
    folder: Path | str,
    layers: LayerRange,
    *,
    dtype: str,
    devices: Sequence[str],
    draft_device: str | None = None,
    draft: str = "none",
    weights: str = UNQUANTISED,
    slots: int | None = None,
    path: str = "auto",
    context: int | None = None,
    is_context_named: bool = True,
    is_early: bool = False,
) -> LoadPlan:
    """The plan of a load with these arguments (`Engine.load`'s), against what is free now.

    Args:
        folder: the model's; its weights need not be there yet.
        context: positions at the most; None, or more than the model was made for, is what it was made for.
        is_context_named: `context` has to fit; otherwise the largest up to it that does is taken.
        is_early: the load comes later: a context that is not named leaves something of what is free, and is a multiple
            of LEAST_CONTEXT.
        slots: sequences at once; None: MAX_GPU_SESSIONS, and on a CPU as many as fit, up to MAX_SESSIONS.

    Raises:
        NotEnoughMemory: with the numbers: the named context does not fit, or too little does.
    """
    places = [torch.device(each) for each in devices]
    is_cpu = places[0].type == "cpu"
    most_slots = slots or (limits.MAX_SESSIONS if is_cpu else limits.MAX_GPU_SESSIONS)
    least_slots = 1 if is_cpu and not slots else most_slots
    shape = read_shape(Path(folder))
    most = shape.max_context
    is_named = context is not None and is_context_named
    wanted = min(context or most, most)
    drafting = torch.device(draft_device or places[0])
    free = {indexed(each): free_memory(each) for each in (*places, drafting)}
    ranges = split_range(layers, [free[indexed(place)] for place in places]) if len(places) > 1 else [layers]
    if is_early and not is_named:
        free = {place: size - size // _SPARE for place, size in free.items()}

    def plans_at(ranges: list[LayerRange], positions: int, slots: int = least_slots) -> Plans:
        return plans_for(
            folder,
            ranges,
            places,
            draft=draft if layers.first == 0 else "none",
            draft_device=drafting,
            dtype=dtype,
            weights=weights,
            slots=slots,
            context=positions,
            path=path,
            free=free,
        )

    if not fit(plans_at(ranges, wanted)):
        least = wanted if is_named else min(limits.LEAST_CONTEXT, wanted)
        largest, ranges = best_division(ranges, wanted, plans_at)
        if largest < least:
            _refuse(plans_at(ranges, least), largest, layers)
        if is_early:
            largest -= largest % limits.LEAST_CONTEXT  # so that it is the same after a restart, more often than not
        wanted = largest
    slots = next((count for count in range(most_slots, 0, -1) if fit(plans_at(ranges, wanted, count))), least_slots)
    is_apart = is_embedding_apart(shape, ranges[0], places[0], draft=draft, draft_device=drafting)
    return LoadPlan(wanted, ranges, slots, plans_at(ranges, wanted, slots), is_apart)


def _refuse(plans: Plans, largest: int, layers: LayerRange) -> None:
    """Raises NotEnoughMemory for the first device that is too small, with the numbers and what would fit."""
    for place, plan in plans:
        if plan.fits:
            continue
        if largest > 0:
            advice = f"a context of {largest} would fit"
        elif plan.is_for_draft:
            advice = "draft on another device, or with a smaller model"
        elif len(layers) > 1:
            advice = "hold fewer layers, or run them with int8 weights"
        else:
            advice = "not one layer of this model fits there"
        raise NotEnoughMemory(f"{place}: {plan.words()}; {advice}")


def is_embedding_apart(
    shape: ModelShape, layers: LayerRange, place: torch.device, *, draft: str, draft_device: torch.device
) -> bool:
    """Whether `place`, which holds `layers`, leaves the embedding in the host's memory.

    A block needs a few rows of it, which the host finds as fast; a GPU has better use for 1 GB. But a tied head is the
    embedding, and a draft that was made for the target looks its own tokens up in it, inside its graph.
    """
    if place.type == "cpu" or layers.first > 0 or (shape.tied and layers.last >= shape.layers):
        return False
    kind, _, folder = draft.partition(":")
    is_shared = kind == "model" and bool(folder) and is_draft(folder) and indexed(draft_device) == indexed(place)
    return not is_shared


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
    path: str | None = None,
    draft: int = 0,
    is_of_draft: bool = False,
    is_apart: bool = False,
) -> Plan:
    """The plan of one slice of the model in `folder`; `path` is `path_of`'s, by default the best for the device.

    Args:
        is_apart: as `is_embedding_apart` says.
    """
    shape = read_shape(Path(folder))
    size = size_bytes(range_tensors(shape, layers), dtype)
    if is_apart:
        size -= shape.vocabulary * shape.hidden_size * DTYPE_BYTES[dtype]
    if weights == INT8:
        size -= int8_saving(shape, len(layers), dtype)
    per_position = 2 * len(layers) * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
    # The rotary tables stand for the same positions.
    per_position += -(-2 * shape.head_dim * DTYPE_BYTES[dtype] // slots)
    workspace = workspace_bytes(
        shape,
        layers,
        dtype,
        positions=cache_positions(context),
        path=path or ("fused" if is_gpu else "eager"),
        is_gpu=is_gpu,
        weights=weights,
        slots=slots,
        is_draft=is_of_draft,
    )
    return Plan(
        weights=size,
        cache_per_position=per_position,
        context=context,
        slots=slots,
        workspace=workspace,
        draft=draft,
        free=free,
    )


def plan_draft(
    folder: Path | str,
    *,
    dtype: str,
    context: int,
    slots: int,
    is_gpu: bool,
    path: str | None = None,
    is_embedding_shared: bool = True,
) -> int:
    """Bytes of a whole draft model with its caches, beside a slice that counts what a device needs once.

    Args:
        is_embedding_shared: whether a draft that was made for its target finds the target's embedding on its device.
    """
    alone = plan_draft_alone(folder, dtype=dtype, context=context, slots=slots, free=0, is_gpu=is_gpu, path=path)
    total = alone.total - (CUDA_CONTEXT_BYTES if is_gpu else 0)
    if is_embedding_shared and is_draft(folder):
        shape = read_shape(Path(folder))
        total -= shape.vocabulary * shape.hidden_size * DTYPE_BYTES[dtype]
    return total


def plan_draft_alone(
    folder: Path | str, *, dtype: str, context: int, slots: int, free: int, is_gpu: bool, path: str | None = None
) -> Plan:
    """The plan of a draft model on a device that has nothing of the slice: an embedding is its own there."""
    shape = read_shape(Path(folder))
    plan = plan_slice(
        folder,
        LayerRange(0, shape.layers),
        dtype=dtype,
        weights="",
        context=context,
        slots=slots,
        free=free,
        is_gpu=is_gpu,
        path=path,
        is_of_draft=True,
    )
    size = plan.weights
    if is_draft(folder):
        # The head has some of the tokens, also where the whole model's is its embedding.
        row = shape.hidden_size * DTYPE_BYTES[dtype]
        size += len(read_draft(folder).tokens) * row - (0 if shape.tied else shape.vocabulary * row)
    return replace(plan, weights=size, is_for_draft=True)


def int8_saving(shape: ModelShape, layers: int, dtype: str) -> int:
    """Bytes that int8 takes off the products of so many layers; each channel gets a float32 scale."""
    products: dict[str, tuple[int, ...]] = {
        name: size for name, size in layer_tensors(shape, 0).items() if len(size) == 2
    }
    each = size_bytes(products, dtype)
    small = each // DTYPE_BYTES[dtype] + 4 * sum(size[0] for size in products.values())
    return layers * (each - small)


def free_memory(device: torch.device) -> int:
    """Bytes; 0 where it is not known."""
    return max(1, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_memory()[0]


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
    path: str = "auto",
    free: Mapping[torch.device, int] | None = None,
) -> Plans:
    """What each device is to hold: the slice's parts in order, then a draft that is on none of their devices.

    Args:
        ranges: of the slice's parts, one for each of `places`; a place too many holds nothing.
        draft: `none`, `ngram` or `model:PATH`.
        slots: sequences at once.
        context: positions of a sequence.
        path: one of `running.PATHS`.
        free: bytes of each device; what is free now, where it is not given.
    """
    kind, _, path_to_draft = draft.partition(":")
    drafting = indexed(draft_device) if kind == "model" and path_to_draft else None
    shape = read_shape(Path(folder))

    def free_of(place: torch.device) -> int:
        return free_memory(place) if free is None else free[indexed(place)]

    plans: Plans = []
    # A device that is named again has what the parts before leave of it.
    used: dict[torch.device, int] = {}
    for layers, place in zip(ranges, places, strict=False):
        is_gpu = place.type == "cuda"
        before = used.get(indexed(place), 0)
        drafts = 0
        if indexed(place) == drafting and not before:
            drafts = plan_draft(
                path_to_draft,
                dtype=dtype,
                context=context,
                slots=slots,
                is_gpu=is_gpu,
                path=path_of(read_shape(Path(path_to_draft)), place, path),
                is_embedding_shared=indexed(places[0]) == drafting,
            )
        plan = plan_slice(
            folder,
            layers,
            dtype=dtype,
            weights=weights,
            context=context,
            slots=slots,
            free=_left(free_of(place), before),
            is_gpu=is_gpu,
            path=path_of(shape, place, path),
            draft=drafts,
            is_apart=is_embedding_apart(shape, layers, place, draft=draft, draft_device=draft_device),
        )
        used[indexed(place)] = before + plan.total
        plans.append((place, plan))
    if drafting is not None and all(indexed(place) != drafting for place, _ in plans):
        plan = plan_draft_alone(
            path_to_draft,
            dtype=dtype,
            context=context,
            slots=slots,
            free=free_of(drafting),
            is_gpu=drafting.type == "cuda",
            path=path_of(read_shape(Path(path_to_draft)), drafting, path),
        )
        plans.append((drafting, plan))
    return plans


def _left(free: int, taken: int) -> int:
    """0 stays for what is not known."""
    return max(1, free - taken) if free else 0
