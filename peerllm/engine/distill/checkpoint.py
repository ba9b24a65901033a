"""All that a stopped run needs to go on, in `training/` of the draft's folder.

`state.json` names the file of tensors that belongs to it and is replaced after that file is whole, so that the two are
always of one moment. Weights are kept in float32, the optimiser's moments in bfloat16: their last digits do not matter,
and half the size is half the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.files import replace_json, replace_tensors
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.student import trained_parameters
from peerllm.engine.distill.training import Trainer
from peerllm.models.checkpoint import Checkpoint, Staging, read_header, read_json
from peerllm.models.drafts import are_ascending_ids
from peerllm.protocol.errors import ModelError, ProtocolError
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.identity import ModelIdentity

FOLDER = "training"
_STATE = "state.json"
_LOCK = "lock"
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class RunState:
    """Where a run is. Counts are over all its stretches."""

    recipe: Recipe
    identity: ModelIdentity
    tokens: list[int]
    """The head's."""
    made: int = 0
    """Of the target's answers."""
    trained: int = 0
    """Answer tokens that the student was trained on, each as often as it was."""
    seconds: float = 0.0
    generating_seconds: float = 0.0
    training_seconds: float = 0.0
    drawn: int = 0
    steps: int = 0
    next_number: int = 0
    """Of the next sequence that the target makes."""
    stretches: int = 1
    is_done: bool = False
    held_out: list[Sample] = field(default_factory=list)
    unseen: list[Sample] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def progress(self) -> float:
        """The share of the recipe that is done."""
        if self.recipe.hours is not None:
            return min(1.0, self.seconds / (3600 * self.recipe.hours))
        return min(1.0, self.trained / (self.recipe.tokens * self.recipe.reuse))


_LEFTOVERS = (".writable", ".half")
"""How names end of what a killed run leaves."""
_locks: dict[Path, int] = {}


def lock(out: Path) -> None:
    """Keeps the run in `out` for this process, for as long as it lives.

    Raises:
        ModelError: another process works on it, or the folder cannot be written.
    """
    folder = (out / FOLDER).absolute()
    if folder in _locks:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ModelError(f"another process distils into {out} now; name another folder with --out") from None
    _locks[folder] = descriptor


def is_fresh(out: Path) -> bool:
    """Whether nothing is in `out` but what a run that was killed before its first checkpoint leaves."""
    return not out.is_dir() or all(path.name == FOLDER or path.name.endswith(_LEFTOVERS) for path in out.iterdir())


def has_checkpoint(out: Path) -> bool:
    return (out / FOLDER / _STATE).is_file()


def save(out: Path, state: RunState, trainer: Trainer) -> None:
    """Raises ModelError where the disk is full; the checkpoint before is then still there."""
    folder = out / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error
    parameters = trained_parameters(trainer.student)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter
        moments = trainer.optimiser.state.get(parameter, {})
        for moment in _MOMENTS:
            if moment in moments:
                tensors[f"{moment}.{name}"] = moments[moment].to(torch.bfloat16)
    file = f"step-{state.steps}.safetensors"
    replace_tensors(folder / file, tensors)
    replace_json(folder / _STATE, _to_map(state, file))
    for old in folder.glob("step-*.safetensors"):
        if old.name != file:
            with contextlib.suppress(OSError):
                old.unlink()


def load_state(out: Path) -> RunState:
    """Raises ModelError: no checkpoint there, damaged, or of another release."""
    path = out / FOLDER / _STATE
    if not path.is_file():
        raise ModelError(f"{out} has no run to go on with: there is no {FOLDER}/{_STATE}")
    found = read_json(path)
    if found.get("format") != _FORMAT:
        raise ModelError(f"{path} is of another release")
    try:
        # Weights that are not there are said now, and not after the first answers.
        read_header(path.with_name(str(found["file"])))
        _check_types(found)
        return RunState(
            recipe=Recipe.from_map(found["recipe"]),
            identity=from_map(ModelIdentity, found["identity"]),
            held_out=[_sample(each) for each in found["held_out"]],
            unseen=[_sample(each) for each in found["unseen"]],
            **{name: found[name] for name in _PLAIN},
        )
    except (KeyError, TypeError, ValueError, AttributeError, ProtocolError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def load_into(out: Path, state: RunState, trainer: Trainer) -> None:
    """Weights and moments of the checkpoint into `trainer`. Raises ModelError where its file is missing or damaged."""
    path = out / FOLDER / str(read_json(out / FOLDER / _STATE).get("file"))
    if path.parent != out / FOLDER:
        raise ModelError(f"{out / FOLDER / _STATE} names a file outside its folder")
    entries = read_header(path)
    checkpoint = Checkpoint(path.parent, dict.fromkeys(entries, path.name), entries)
    staging = Staging()
    for name, parameter in trained_parameters(trainer.student).items():
        _read(checkpoint, name, parameter.data, staging)
        if f"{_MOMENTS[0]}.{name}" not in entries:
            continue
        kept: dict[str, torch.Tensor] = {}
        for moment in _MOMENTS:
            kept[moment] = torch.empty_like(parameter.data)
            _read(checkpoint, f"{moment}.{name}", kept[moment], staging)
        step_device = parameter.device if trainer.optimiser.defaults.get("fused") else "cpu"
        kept["step"] = torch.tensor(float(state.steps), dtype=torch.float32, device=step_device)
        trainer.optimiser.state[parameter] = kept


def _read(checkpoint: Checkpoint, name: str, target: torch.Tensor, staging: Staging) -> None:
    try:
        checkpoint.read_into(name, target, staging)
    except ValueError as error:
        raise ModelError(f"the checkpoint in {checkpoint.folder} is of another draft: {error}") from error


_PLAIN = (
    "tokens", "made", "trained", "seconds", "generating_seconds", "training_seconds", "drawn", "steps", "next_number",
    "stretches", "is_done", "reports",
)  # fmt: skip


def _check_types(found: dict[str, Any]) -> None:
    """Raises ValueError for a field that no run writes so."""
    for name in ("made", "trained", "drawn", "steps", "next_number", "stretches"):
        if type(found[name]) is not int or found[name] < 0:
            raise ValueError(f"{name} is no count")
    for name in ("seconds", "generating_seconds", "training_seconds"):
        if not isinstance(found[name], int | float) or not found[name] >= 0:
            raise ValueError(f"{name} is no time")
    tokens = found["tokens"]
    if not isinstance(tokens, list) or not 0 < len(tokens) <= found["recipe"]["vocab_top"]:
        raise ValueError("tokens are not the head's")
    if not are_ascending_ids(tokens):
        raise ValueError("tokens are not the head's")
    if not all(isinstance(report, dict) for report in found["reports"]):
        raise ValueError("reports are none")


def _to_map(state: RunState, file: str) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "file": file,
        "recipe": state.recipe.to_map(),
        "identity": to_map(state.identity),
        **{name: getattr(state, name) for name in _PLAIN},
        "held_out": [_plain(each) for each in state.held_out],
        "unseen": [_plain(each) for each in state.unseen],
    }


def _plain(sample: Sample) -> list[Any]:
    return [sample.tokens.tolist(), sample.start, sample.temperature, sample.seed]


def _sample(value: list[Any]) -> Sample:
    tokens, start, temperature, seed = value
    if not 0 < start <= len(tokens):
        raise ValueError("an answer begins outside its text")
    return Sample(numpy.array(tokens, dtype=numpy.int32), int(start), float(temperature), int(seed))
