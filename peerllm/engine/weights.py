"""Fills a slice's parameters from a checkpoint folder, reading no other tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from peerllm.engine.slice import ModelSlice
from peerllm.models.checkpoint import Checkpoint, load_parameters

Progress = Callable[[str, float], None]
"""A stage in words, and the fraction of it that is done."""


def load_weights(
    part: ModelSlice,
    folder: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress,
    stage: str = "reading weights",
) -> None:
    """Reads the tensors of `part` from the safetensors files in `folder` to `device` as `dtype`.

    Raises:
        ModelError: files or tensors are missing or of another shape.
    """
    checkpoint = Checkpoint.open(folder)
    load_parameters(part, checkpoint, part.weight_map(), dtype, device, lambda fraction: progress(stage, fraction))
