"""Files that are there whole or as they were before, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peerllm.protocol.errors import ModelError


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """`path` as `write` makes it, under another name until it is whole and on the disk.

    Raises:
        ModelError: the disk is full or cannot be written; what was at `path` is still there.
    """
    from safetensors import SafetensorError

    half = path.with_name(f".{path.name}.half")
    try:
        write(half)
        descriptor = os.open(half, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        half.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path} cannot be written: {reason}; what was there before still is") from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Raises ModelError as `replace_file`."""

    def write(half: Path) -> None:
        half.write_text(text, encoding="utf-8")

    replace_file(path, write)


def replace_json(path: Path, value: Any) -> None:
    """Raises ModelError as `replace_file`."""
    replace_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def replace_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file. Raises ModelError as `replace_file`."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}

    def write(half: Path) -> None:
        save_file(whole, str(half), metadata={"format": "pt"})
        # safetensors writes for its owner alone; a draft is a file like others.
        half.chmod(0o644)

    replace_file(path, write)
