"""The target, whole and ready, and the checks that come before hours are spent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from peerllm import models
from peerllm.engine.codec import DTYPES
from peerllm.engine.distill.options import Recipe, Settings
from peerllm.engine.distill.prompts import PromptFile, Turns, find_turns, read_prompts
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import Progress, load_weights
from peerllm.models.allowlist import ModelShape, check_folder
from peerllm.models.drafts import identity_of
from peerllm.models.layout import layer_tensors, size_bytes
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import BadRequest, ModelError
from peerllm.protocol.identity import LayerRange, ModelIdentity

_CHECKPOINT_COPIES = 2
"""One is written while the older is still there."""
_SPARE_BYTES = 64 << 20


@dataclass(slots=True)
class Target:
    name: str
    source: str | None
    folder: Path
    shape: ModelShape
    identity: ModelIdentity
    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end an answer."""


def find_target(settings: Settings, progress: Progress) -> Target:
    """Finds the target and says what stands against distilling it.

    Raises:
        ModelError: not there, not supported, or its tokenizer does not say where an answer ends.
        DownloadNeeded: its weights are not here, and `allow_download` is false.
    """
    found = models.describe(settings.target, allow_download=settings.allow_download, progress=progress)
    folder = models.fetch(found, LayerRange(0, found.layers), allow_download=settings.allow_download, progress=progress)
    tokenizer = Tokenizer.load(folder)
    shape = check_folder(folder)
    stops = frozenset(token for token in tokenizer.eos_token_ids if token < shape.vocabulary)
    if not stops:
        raise ModelError(
            f"{found.name}: neither its tokenizer nor its config.json names a token that ends an answer "
            "(eos_token_id), so no answer would ever end"
        )
    return Target(found.name, found.source, folder, shape, identity_of(folder, progress), tokenizer, stops)


def find_prompts(target: Target, settings: Settings, recipe: Recipe) -> Turns | PromptFile:
    """Where prompts come from. Raises ModelError as `find_turns`, `read_prompts`."""
    if settings.prompts is None:
        turns = find_turns(target.tokenizer)
        most = recipe.prompt_tokens - len(turns.opener) - len(turns.closer)
        if most < 2:
            raise BadRequest(
                f"--prompt-tokens {recipe.prompt_tokens} leaves no words: the chat template takes "
                f"{len(turns.opener) + len(turns.closer)} of them"
            )
        return turns
    return read_prompts(settings.prompts, target.tokenizer, most=recipe.prompt_tokens)


def check_disk(out: Path, target: Target, recipe: Recipe) -> None:
    """Raises ModelError unless there is room for the draft and its checkpoints, or where `out` cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror or error}") from error
    layers = recipe.layers * size_bytes(layer_tensors(target.shape, 0), "float32")
    # Weights in float32, two moments in bfloat16; the draft itself in half precision with an untied head's rows.
    needed = _CHECKPOINT_COPIES * 2 * layers + layers + 4 * recipe.vocab_top * target.shape.hidden_size + _SPARE_BYTES
    if free < needed:
        raise ModelError(
            f"{out}: {needed >> 20} MiB are needed for the draft and its checkpoints; {free >> 20} are free"
        )


def load_target(
    target: Target, settings: Settings, probe: Callable[[ModelSlice], bool], progress: Progress
) -> ModelSlice:
    """The whole target on its device. On a GPU in float16 or, where `probe` finds that it overflows, in bfloat16.

    Raises:
        BadRequest: the device or the dtype is not known here.
        ModelError: weights are missing or do not fit.
    """
    name = settings.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("drafts are made on cuda or cpu")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadRequest(f"--device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if settings.dtype is not None and settings.dtype not in DTYPES:
        raise BadRequest(f"--dtype {settings.dtype!r} is not one of {', '.join(DTYPES)}")
    tried = [settings.dtype] if settings.dtype else ["float32"] if device.type == "cpu" else ["float16", "bfloat16"]
    for dtype in tried:
        part = ModelSlice(read_config(target.folder), LayerRange(0, target.shape.layers))
        load_weights(part, target.folder, DTYPES[dtype], device, progress, "reading the target")
        if dtype == tried[-1] or probe(part):
            return part
    raise RuntimeError("the last dtype is taken as it is")
