"""Draft folders that `peerllm distill` makes: a few layers for one target, without what the target has anyway.

    config.json         a whole model's, with the draft's layers
    model.safetensors   layers and final norm; of an untied target the rows of the cut head as `draft.head.weight`
    draft.json          whose draft it is, which of the target's tokens the head keeps, figures
    README.md           the model card

The embedding is the target's own, and so is the head of a target with tied embeddings. Importing this brings no torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peerllm.models.allowlist import check_folder, read_shape
from peerllm.models.cache import Progress, no_progress
from peerllm.models.checkpoint import Checkpoint, read_json
from peerllm.models.identity import config_hash, folder_identity
from peerllm.models.layout import NORM, layer_tensors
from peerllm.protocol.errors import DraftMismatch, ModelError, ModelNotFound, ProtocolError
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.identity import ModelIdentity

DRAFT_FILE = "draft.json"
HEAD_ROWS = "draft.head.weight"
FORMAT = 1
_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True)
class DraftFile:
    """What draft.json says."""

    target: ModelIdentity
    target_name: str
    tokens: tuple[int, ...]
    """The target's ids of the head's rows, ascending."""
    is_head_stored: bool
    """Whether the head's rows are in the draft's own file: an untied target's are not in its embedding."""
    init_from: tuple[int, ...] = ()
    """The target's layers that the draft's began as."""
    figures: dict[str, Any] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": {"name": self.target_name, "identity": to_map(self.target)},
            "embedding": "target",
            "head": "stored" if self.is_head_stored else "target",
            "init_from": list(self.init_from),
            "figures": self.figures,
            "tokens": list(self.tokens),
        }


def are_ascending_ids(tokens: list[Any]) -> bool:
    """Whether these can be the tokens of a cut head."""
    return all(type(token) is int and token >= 0 for token in tokens) and sorted(set(tokens)) == tokens


def is_draft(folder: str | Path) -> bool:
    """Whether `folder` holds a draft of ours, which needs its target to run."""
    return (Path(folder) / DRAFT_FILE).is_file()


def read_draft(folder: str | Path) -> DraftFile:
    """Raises ModelError that names the file where it is damaged or of a later release."""
    path = Path(folder) / DRAFT_FILE
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise ModelError(f"{path} has format {str(found.get('format'))[:16]}; this release reads {FORMAT}")
    target, tokens = found.get("target"), found.get("tokens")
    if not isinstance(target, dict) or not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path} is damaged: it names no target, or no tokens")
    if not are_ascending_ids(tokens):
        raise ModelError(f"{path} is damaged: its tokens are not ascending ids")
    try:
        identity = from_map(ModelIdentity, target.get("identity"))
    except ProtocolError as error:
        raise ModelError(f"{path} is damaged: {error.message}") from error
    if not isinstance(found.get("init_from") or [], list) or not isinstance(found.get("figures") or {}, dict):
        raise ModelError(f"{path} is damaged: init_from or figures")
    return DraftFile(
        target=identity,
        target_name=str(target.get("name"))[:256],
        tokens=tuple(tokens),
        is_head_stored=found.get("head") == "stored",
        init_from=tuple(found.get("init_from") or ()),
        figures=found.get("figures") or {},
    )


def identity_of(folder: Path, progress: Progress = no_progress) -> ModelIdentity:
    """Of a local model. Raises ModelError as `folder_identity`."""
    return folder_identity(folder, check_folder(folder), Checkpoint.open(folder), progress)[0]


def check_target(folder: str | Path, target: str | Path, progress: Progress = no_progress) -> DraftFile:
    """The draft in `folder`, which is for the model in the folder `target`.

    Raises:
        DraftMismatch: it is for another model or tokenizer; says in what they differ.
        ModelError: one of the two is damaged.
    """
    draft = read_draft(folder)
    differences = draft.target.differences(identity_of(Path(target), progress))
    if differences:
        raise DraftMismatch(
            f"{folder} is a draft for {draft.target_name} and not for this model; they differ in "
            f"{', '.join(differences)}. Make one with: peerllm distill"
        )
    vocabulary = check_folder(Path(target)).vocabulary
    if draft.tokens[-1] >= vocabulary:
        raise DraftMismatch(f"{folder} has a head for token {draft.tokens[-1]}; the target has {vocabulary} tokens")
    return draft


def check_draft(folder: str | Path) -> None:
    """Whether `folder` can be a draft at all, before anything is loaded: a draft of ours or a whole model.

    Raises:
        ModelError: neither, or damaged; says what is missing.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelNotFound(f"{path} is no folder here")
    shape = check_folder(path)
    if not is_draft(path):
        return
    draft = read_draft(path)
    again = "copy or make the draft again"
    # Its configuration is the target's but for the layers, and its tensors are of those shapes.
    if config_hash(replace(shape, layers=draft.target.layers)) != draft.target.config:
        raise ModelError(f"{path}/config.json is not that of a draft for {draft.target_name}; {again}")
    if draft.is_head_stored == shape.tied:
        raise ModelError(f"{path}/{DRAFT_FILE} and config.json differ in whose the head is; {again}")
    checkpoint = Checkpoint.open(path)
    wanted: dict[str, tuple[int, ...]] = {NORM: (shape.hidden_size,)}
    for layer in range(shape.layers):
        wanted |= layer_tensors(shape, layer)
    if draft.is_head_stored:
        wanted[HEAD_ROWS] = (len(draft.tokens), shape.hidden_size)
    for name, size in sorted(wanted.items()):
        if name not in checkpoint.names():
            raise ModelError(f"{path} lacks tensor {name!r}; {again}")
        if checkpoint.shape(name) != size:
            raise ModelError(f"{path}: tensor {name!r} is {checkpoint.shape(name)} and not {size}; {again}")
    if not checkpoint.names() <= wanted.keys():
        raise ModelError(f"{path} has more layers than its config.json says; {again}")


def shipped(name: str) -> Path | None:
    """The draft in this package for the model called `name`; None where there is none."""
    folder = _SHIPPED / name
    return folder if is_draft(folder) and (folder / "model.safetensors").is_file() else None


def shipped_for(target: str | Path, progress: Progress = no_progress) -> Path | None:
    """The draft in this package for the model in the folder `target`, whatever its name; None where there is none.

    While none of the target's weights are here its configuration decides: memory is planned for what may come.
    """
    config = config_hash(read_shape(Path(target)))
    is_here = any(Path(target).glob("*.safetensors"))
    for name in sorted(path.name for path in _SHIPPED.glob("*")):
        folder = shipped(name)
        # Only a target of the same shape is worth the hashing of its files.
        if folder is None or read_draft(folder).target.config != config:
            continue
        with contextlib.suppress(DraftMismatch):
            if is_here:
                check_target(folder, target, progress)
            return folder
    return None
