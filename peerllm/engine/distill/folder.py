"""The draft as a folder: what `--draft D` loads, its model card, and a whole Hugging Face model out of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from peerllm import __version__
from peerllm.engine.distill import reporting
from peerllm.engine.distill.checkpoint import RunState
from peerllm.engine.distill.files import replace_file, replace_json, replace_tensors, replace_text
from peerllm.engine.distill.student import trained_parameters
from peerllm.engine.distill.target import Target
from peerllm.engine.drafting.distilled import CutSlice
from peerllm.models.checkpoint import SINGLE_FILE, Checkpoint, Staging, read_json
from peerllm.models.drafts import DRAFT_FILE, HEAD_ROWS, DraftFile, check_target, read_draft
from peerllm.models.layout import EMBEDDING, HEAD
from peerllm.protocol.errors import ModelError

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_LARGEST_HALF = 65504.0


def write_draft(out: Path, student: CutSlice, target: Target, state: RunState, figures: Mapping[str, Any]) -> None:
    """Writes or renews the draft in `out`; each file is whole at every moment.

    Raises:
        ModelError: the disk is full; the draft before is still there.
    """
    parameters = trained_parameters(student)
    largest = max(float(each.detach().abs().max()) for each in parameters.values())
    dtype = torch.float16 if largest < _LARGEST_HALF else torch.bfloat16
    tensors = {name: parameter.detach().to(dtype) for name, parameter in parameters.items()}
    if not target.shape.tied:
        if student.head is None:
            raise RuntimeError("a student ends with a head")
        tensors[HEAD_ROWS] = student.head.weight.detach().to(dtype)
    replace_tensors(out / SINGLE_FILE, tensors)
    replace_json(out / "config.json", draft_config(target.folder, state.recipe.layers, dtype))
    replace_text(out / "README.md", model_card(target, state, figures))
    draft = DraftFile(
        target=target.identity,
        target_name=target.source or target.name,
        tokens=tuple(state.tokens),
        is_head_stored=not target.shape.tied,
        init_from=state.recipe.init_from,
        figures=dict(figures),
    )
    replace_text(out / DRAFT_FILE, json.dumps(draft.to_map(), ensure_ascii=False) + "\n")


def draft_config(target: Path, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The target's config.json with the draft's layers."""
    config = read_json(target / "config.json")
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def export_hf(draft: Path, target: Path, out: Path) -> None:
    """A whole Hugging Face model of the draft in `draft`: the target's embedding and whole head, and its tokenizer.

    Raises:
        ModelError: the two do not belong together, or the disk is full.
    """
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; name a new folder with --export-hf")
    check_target(draft, target)
    out.mkdir(parents=True, exist_ok=True)
    config = read_json(draft / "config.json")
    dtype: torch.dtype = getattr(torch, config["dtype"])
    tensors: dict[str, torch.Tensor] = {}
    edges = (EMBEDDING,) if config["tie_word_embeddings"] else (EMBEDDING, HEAD)
    own = sorted(Checkpoint.open(draft).names() - {HEAD_ROWS})
    for source, names in ((draft, own), (target, edges)):
        checkpoint = Checkpoint.open(source)
        for name in names:
            tensors[name] = torch.empty(checkpoint.shape(name), dtype=dtype)
            checkpoint.read_into(name, tensors[name], Staging())
    replace_tensors(out / SINGLE_FILE, tensors)
    replace_json(out / "config.json", config)
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            _copy(target / name, out / name)
    card = (draft / "README.md").read_text(encoding="utf-8")
    heading, _, rest = card.partition("\n\n")
    whole = "A whole model, with the target's embedding, head and tokenizer. The card of the draft that it is made of:"
    replace_text(out / "README.md", f"{heading}\n\n{whole}\n\n{rest}")


def _copy(source: Path, out: Path) -> None:
    def write(half: Path) -> None:
        shutil.copyfile(source, half)

    replace_file(out, write)


def model_card(target: Target, state: RunState, figures: Mapping[str, Any]) -> str:
    """Recipe, data, figures and the target's identity, in Markdown."""
    recipe = state.recipe
    name = target.source or target.name
    prompts = "made by the target itself" if recipe.prompts is None else f"of a file with sha256 {recipe.prompts}"
    lines = [
        f"# A draft model for {name}",
        "",
        f"Made by `peerllm distill` (release {__version__}). It guesses tokens ahead of {name} and of no other model:",
        f"its embedding{' and its head are' if target.shape.tied else ' is'} the target's own and not in this folder. "
        "Use it with `--draft FOLDER`.",
        "",
        "## Recipe",
        f"- {recipe.layers} layers of the target's shape, begun from its layers {_listed(recipe.init_from)}",
        f"- head: the {len(state.tokens)} tokens of {target.shape.vocabulary} that the target used most",
        "- loss: cross-entropy with the target's full distribution, AdamW, "
        f"learning rate {recipe.learning_rate:g}, {recipe.step_tokens} tokens a step, {state.steps} steps",
        "",
        "## Data",
        f"- prompts {prompts}, its own answers at temperatures {_listed(recipe.temperatures)}:",
        f"  {state.made} tokens, each trained on about {recipe.reuse} times",
        f"- one prompt of {recipe.held_out_every}, by its hash, was never trained on",
        "",
        "## Figures",
        f"After {figures['seconds'] / 60:.1f} minutes, answers made at {figures['tokens_per_second']:,.0f} tokens/s.",
        "On prompts that it was not trained on (unseen: a hundred that come with peerllm; held out: the target's own):",
        "",
        *reporting.figures_table(figures),
        "",
        "## The target",
        f"- configuration {target.identity.config}",
        f"- vocabulary {target.identity.vocabulary}",
        f"- tensors {target.identity.tensors}",
        *(f"- {file} {digest}" for file, digest in sorted(target.identity.files.items())),
        "",
    ]
    return "\n".join(lines)


def figures_of(draft: Path) -> dict[str, Any]:
    """What the draft's file says of it."""
    return read_draft(draft).figures


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
