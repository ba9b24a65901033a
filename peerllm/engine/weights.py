"""Fills a slice's parameters from a checkpoint folder, reading no other tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from peerllm.engine.int8 import quantise_layer
from peerllm.engine.out_of_memory import give_back
from peerllm.engine.planting import is_planted, plant, read_recipe
from peerllm.engine.slice import ModelSlice
from peerllm.models.checkpoint import Checkpoint, load_parameters
from peerllm.protocol.errors import BadRequest
from peerllm.protocol.identity import INT8, UNQUANTISED

Progress = Callable[[str, float], None]
"""A stage in words, and the fraction of it that is done."""
_Read = Callable[[dict[str, str], Callable[[float], None] | None], object]
"""What fills the parameters of a map such as `weight_map` gives, and reports the fraction that is done."""
_EMBEDDING = "embed.weight"
WEIGHTS = (UNQUANTISED, INT8)
"""What a peer runs its layers' weights as."""


def load_weights(
    part: ModelSlice,
    folder: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress,
    stage: str = "reading weights",
    *,
    weights: str = UNQUANTISED,
) -> None:
    """Reads the tensors of `part` from the safetensors files in `folder` to `device` as `dtype`.

    Args:
        weights: one of `WEIGHTS`.

    Raises:
        ModelError: files or tensors are missing or of another shape.
        BadRequest: `weights` is not known.
    """
    if weights not in WEIGHTS:
        raise BadRequest(f"weights {weights[:32]!r} are not one of {', '.join(WEIGHTS)}", param="weights")
    names = part.weight_map()
    is_whole = weights != INT8 and not is_planted(folder)
    read = _reader(part, folder, dtype, device)
    if part.embed is not None and not part.takes_tokens:
        # By way of the device, before anything else is there: what is planted depends on the kind of device.
        read({_EMBEDDING: names.pop(_EMBEDDING)}, None)
        part.embed.to("cpu")
    if is_whole:
        read(names, partial(progress, stage))
    else:
        _read_by_layers(part, names, read, partial(progress, stage), is_quantised=weights == INT8)
    if torch.device(device).type == "cuda":
        # What was there on the way, before something small takes a piece of it and holds the whole.
        give_back()


def _read_by_layers(
    part: ModelSlice, names: dict[str, str], read: _Read, report: Callable[[float], None], *, is_quantised: bool
) -> None:
    """So that the whole slice is never there unquantised."""
    groups: dict[str, dict[str, str]] = {}
    for name, tensor in names.items():
        group = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        groups.setdefault(group, {})[name] = tensor
    for done, (group, members) in enumerate(groups.items()):
        read(members, None)
        if group and is_quantised:
            quantise_layer(part.get_submodule(group))
        report((done + 1) / len(groups))


def _reader(part: ModelSlice, folder: Path | str, dtype: torch.dtype, device: torch.device | str) -> _Read:
    if is_planted(folder):
        recipe = read_recipe(folder)
        return lambda members, _: plant(part, members, recipe, dtype, device)
    checkpoint = Checkpoint.open(folder)
    return lambda members, report: load_parameters(part, checkpoint, members, dtype, device, report)
