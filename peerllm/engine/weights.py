"""Fills a slice's parameters from a checkpoint folder, reading no other tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from peerllm.engine.slice import ModelSlice

Progress = Callable[[str, float], None]


def load_weights(
    part: ModelSlice, folder: Path | str, dtype: torch.dtype, device: torch.device | str, progress: Progress
) -> None:
    """Reads the tensors of `part` from the safetensors files in `folder` to `device` as `dtype`.

    Raises:
        ModelError: files or tensors are missing or of another shape.
    """
    import json

    from safetensors import safe_open

    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    names = part.weight_map()
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
    else:
        where = dict.fromkeys(names.values(), "model.safetensors")
    parameters = dict(part.named_parameters())
    for count, (name, tensor_name) in enumerate(names.items()):
        with safe_open(folder / where[tensor_name], framework="pt") as file:
            tensor = file.get_tensor(tensor_name)
        module = part.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        old = parameters[name]
        new = torch.nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True), requires_grad=False)
        setattr(module, leaf, new)
        if part.embed is not None and part.head is not None and old is part.head.weight:
            part.head.weight = new
        progress("reading weights", (count + 1) / len(names))
