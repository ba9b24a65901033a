"""What a distillation makes, and how it is done on this machine.

The recipe decides the draft: it is stored with the run, and a run that goes on keeps it. Settings may change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from peerllm.models.allowlist import ModelShape
from peerllm.models.layout import layer_tensors, size_bytes
from peerllm.protocol.errors import BadRequest

MOST_COST = 0.18
"""What the default draft's weights for a token may be of the target's: a fifth of its time is the aim, and a step has
work that is not weights."""
MOST_LAYERS = 4
"""Of the default draft. Four of SmolLM2-135M's are 28 MB in half precision."""
DEFAULT_VOCAB_TOP = 16384
"""Tokens of the head: with so many of SmolLM2's 49,152 nothing was lost (facts.md)."""
DEFAULT_TOKENS = 40_000_000
_LEARNING_RATE, _LEARNING_WIDTH = 8e-3, 576
"""Measured for SmolLM2-135M: of 1e-3, 2.5e-3, 5e-3 and 8e-3 each was better than the one before (docs/distill.md)."""
WAVES = 16
MOST_WAVE_TOKENS = 2_000_000
_WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Counts are of tokens unless they say otherwise."""

    layers: int
    init_from: tuple[int, ...]
    """The target's layers that the draft's begin as, in order."""
    vocab_top: int
    tokens: int = DEFAULT_TOKENS
    """Of the target's answers, all stretches together."""
    hours: float | None = None
    """Instead of `tokens`: computing time, all stretches together."""
    prompt_tokens: int = 96
    """A prompt of the target's own is at most so long."""
    answer_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 1.0)
    """Answers take turns: half are greedy."""
    reuse: int = 3
    """How often an answer is trained on, on average."""
    step_tokens: int = 32768
    """Of one step of the optimiser."""
    learning_rate: float = 1e-3
    held_out_every: int = 64
    """One prompt of so many, by its hash, is never trained on."""
    prompts: str | None = None
    """sha256 of the file of prompts."""
    seed: int = 0

    def to_map(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_map(cls, value: dict[str, Any]) -> Recipe:
        known = {each.name for each in fields(cls)}
        found: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in value.items() if name in known
        }
        recipe = cls(**found)
        _check(recipe)
        return recipe

    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises: a hundred, or fewer where the whole run has few."""
        if self.hours is not None:
            return _WARMUP_STEPS
        return max(1, min(_WARMUP_STEPS, self.tokens * self.reuse // self.step_tokens // 50))

    def wave_tokens(self) -> int:
        """Of the answers that are made before the student is trained on them."""
        if self.hours is not None:
            return MOST_WAVE_TOKENS
        return max(1, min(MOST_WAVE_TOKENS, self.tokens // WAVES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a stretch is run."""

    target: str
    out: Path
    device: str | None = None
    """None: the first GPU, else the CPU."""
    dtype: str | None = None
    """Of the target; None: float16 on a GPU, and bfloat16 where that overflows; float32 on the CPU."""
    slots: int | None = None
    """Answers made at once; None: 1,024 on a GPU, 16 on the CPU, fewer where memory ends."""
    resume: bool = False
    prompts: Path | None = None
    report_seconds: float = 180.0
    stop_after_minutes: float | None = None
    """Ends this stretch; the run can go on."""
    evaluation_prompts: int = 100
    plot: Path | None = None
    export_hf: Path | None = None
    allow_download: bool = False
    threads: int | None = None


def default_layers(shape: ModelShape, vocab_top: int) -> int:
    """As many of the target's layers as cost at most MOST_COST of its weights a token, one at least."""
    layer = size_bytes(layer_tensors(shape, 0), "float32")
    row = 4 * shape.hidden_size
    whole = shape.layers * layer + shape.vocabulary * row
    room = MOST_COST * whole - min(vocab_top, shape.vocabulary) * row
    return int(max(1, min(MOST_LAYERS, shape.layers - 1, room // layer)))


def default_init(layers: int, of: int) -> tuple[int, ...]:
    """The first half from the target's front, the rest from its end: 0, 1, 28, 29 for 4 of 30."""
    front = (layers + 1) // 2
    return (*range(front), *range(of - (layers - front), of))


def default_learning_rate(shape: ModelShape) -> float:
    """What was best at one width, and less in proportion for wider models.

    Yang and others, "Tensor Programs V" (2022): Adam's best rate for a block's matrices goes with one over the width.
    """
    return _LEARNING_RATE * min(1.0, _LEARNING_WIDTH / shape.hidden_size)


def make_recipe(
    shape: ModelShape,
    *,
    layers: int | None,
    init_from: tuple[int, ...] | None,
    vocab_top: int | None,
    **more: Any,
) -> Recipe:
    """The recipe with defaults for this target.

    Raises:
        BadRequest: options that make no sense for it, or contradict each other.
    """
    top = min(DEFAULT_VOCAB_TOP if vocab_top is None else vocab_top, shape.vocabulary)
    if top < 1:
        raise BadRequest("--vocab-top is a number from 1 up")
    if init_from is not None and layers is None:
        layers = len(init_from)
    if layers is None:
        layers = default_layers(shape, top)
    if not 1 <= layers <= shape.layers:
        raise BadRequest(f"--layers is from 1 to {shape.layers}, the target's own")
    init_from = default_init(layers, shape.layers) if init_from is None else init_from
    if len(init_from) != layers:
        raise BadRequest(f"--init-from names {len(init_from)} layers; the draft has {layers}")
    if any(not 0 <= layer < shape.layers for layer in init_from):
        raise BadRequest(f"--init-from names layers from 0 to {shape.layers - 1}")
    more.setdefault("learning_rate", default_learning_rate(shape))
    recipe = Recipe(layers=layers, init_from=init_from, vocab_top=top, **more)
    _check(recipe)
    longest = recipe.prompt_tokens + recipe.answer_tokens
    if longest > shape.max_context:
        raise BadRequest(
            f"prompt and answer of {longest} tokens do not fit the target's context of {shape.max_context}"
        )
    return recipe


def _check(recipe: Recipe) -> None:
    if recipe.layers != len(recipe.init_from) or recipe.vocab_top < 1:
        raise BadRequest("a recipe's layers begin as one of the target's each, and its head has tokens")
    for name, words in (
        ("tokens", "--tokens"),
        ("prompt_tokens", "--prompt-tokens"),
        ("answer_tokens", "--answer-tokens"),
        ("reuse", "--reuse"),
        ("step_tokens", "--step-tokens"),
    ):
        if getattr(recipe, name) < 1:
            raise BadRequest(f"{words} is a number from 1 up")
    if recipe.hours is not None and not recipe.hours > 0:
        raise BadRequest("--hours is more than 0")
    if not recipe.learning_rate > 0:
        raise BadRequest("--learning-rate is more than 0")
    if not recipe.temperatures or any(not 0 <= each <= 2 for each in recipe.temperatures):
        raise BadRequest("--temperatures are from 0 to 2")
    if recipe.held_out_every < 2:
        raise BadRequest("--held-out-every is a number from 2 up")
