"""Steps of the optimiser: batches of answers of like length, a schedule, and a smaller batch where memory ends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.loss import distribution_loss
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.student import trained_parameters
from peerllm.engine.distill.whole import normed_rows, padded, rows_of
from peerllm.engine.drafting.distilled import CutSlice
from peerllm.engine.slice import ModelSlice
from peerllm.protocol.errors import NonFinite, NotEnoughMemory

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_MOST_NORM = 1.0
_GROUP = 8
"""Steps whose answers are sorted by length together, so that little is padded and the order is still random."""
_LEAST_RATE = 0.01
"""The share of the learning rate that is left at the end."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Means over the step's answer tokens."""

    loss: float
    divergence: float
    agreement: float
    tokens: int


def rate_at(progress: float, step: int, recipe: Recipe) -> float:
    """The learning rate of step number `step` (from 0) when a share of `progress` of the run is done.

    Up in a line by steps, down in one by progress: where a run is measured in hours, much of it may be gone before the
    first step.
    """
    rise = min(1.0, (step + 1) / recipe.warmup_steps())
    return recipe.learning_rate * rise * max(_LEAST_RATE, 1.0 - progress)


def batches(samples: Sequence[Sample], step_tokens: int, seed: int) -> list[list[Sample]]:
    """The samples in steps of about `step_tokens` tokens, each of samples of like length, in random order."""
    order = random.Random(seed)
    mixed = list(samples)
    order.shuffle(mixed)
    steps: list[list[Sample]] = []
    mean = max(1, sum(len(sample.tokens) for sample in mixed) // max(1, len(mixed)))
    group = max(1, _GROUP * step_tokens // mean)
    for start in range(0, len(mixed), group):
        step: list[Sample] = []
        held = 0
        for sample in sorted(mixed[start : start + group], key=lambda each: len(each.tokens)):
            if step and held + len(sample.tokens) > step_tokens:
                steps.append(step)
                step, held = [], 0
            step.append(sample)
            held += len(sample.tokens)
        if step:
            steps.append(step)
    order.shuffle(steps)
    return steps


class Trainer:
    """The student, its optimiser, and the target whose distribution it learns.

    Args:
        student: `student.make_student`'s.
        micro_tokens: padded tokens of one forward and backward; halved where memory ends.
    """

    def __init__(
        self, student: CutSlice, target: ModelSlice, recipe: Recipe, *, length: int, micro_tokens: int
    ) -> None:
        self.student = student
        self.micro_tokens = micro_tokens
        self._target = target
        self._recipe = recipe
        self._parameters = trained_parameters(student)
        student.prepare(length)
        device = target.device
        groups: list[dict[str, Any]] = [
            {"params": [each for each in self._parameters.values() if each.dim() > 1]},
            {"params": [each for each in self._parameters.values() if each.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(
            groups,
            lr=recipe.learning_rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=device.type == "cuda",
        )
        self._half = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None

    def step(self, samples: Sequence[Sample], progress: float, number: int = 0) -> StepFigures:
        """Step `number` of the run on these answers.

        Raises:
            NotEnoughMemory: not even the longest of them alone fits.
            NonFinite: the loss is no number; the weights are as before.
        """
        while True:
            self.optimiser.zero_grad(set_to_none=True)
            try:
                figures = self._gradients(samples)
                break
            except torch.OutOfMemoryError as error:
                longest = max(len(sample.tokens) for sample in samples)
                if self.micro_tokens <= longest:
                    raise NotEnoughMemory("there is no memory to train on even one answer at a time") from error
                self.micro_tokens = max(longest, self.micro_tokens // 2)
                error.__traceback__ = None
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()
        norm = torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), _MOST_NORM)
        if not bool(torch.isfinite(norm)):
            self.optimiser.zero_grad(set_to_none=True)
            raise NonFinite("the loss is not a number; try a lower --learning-rate, or another --dtype")
        for group in self.optimiser.param_groups:
            group["lr"] = rate_at(progress, number, self._recipe)
        self.optimiser.step()
        return figures

    def _gradients(self, samples: Sequence[Sample]) -> StepFigures:
        rows = sum(sample.answer_tokens for sample in samples)
        sums: torch.Tensor | None = None
        for some in self._micro(samples):
            figures = self._micro_step(some, rows)
            sums = figures if sums is None else sums + figures
        if sums is None:
            raise ValueError("a step without answers")
        loss, divergence, agreeing = sums.tolist()
        return StepFigures(loss / rows, divergence / rows, agreeing / rows, rows)

    def _micro(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """In pieces whose padded size is at most `micro_tokens`."""
        some: list[Sample] = []
        longest = 0
        for sample in samples:
            longer = max(longest, len(sample.tokens))
            if some and longer * (len(some) + 1) > self.micro_tokens:
                yield some
                some, longer = [], len(sample.tokens)
            some.append(sample)
            longest = longer
        if some:
            yield some

    def _micro_step(self, samples: Sequence[Sample], rows: int) -> torch.Tensor:
        tokens, places = padded(samples, self._target.device)
        teacher = normed_rows(self._target, tokens, places)
        with self._autocast():
            student = self.student(tokens, rows_of(tokens)).flatten(0, 1).index_select(0, places)
            if self.student.norm is None or self.student.head is None or self._target.head is None:
                raise RuntimeError("student and target end with norm and head")
            student = self.student.norm(student)
        ids = self.student.head_tokens
        if ids is None:
            raise RuntimeError("a student's head has tokens of its own")
        figures, gradient = distribution_loss(
            student.detach(), teacher, self.student.head.weight, self._target.head.weight, ids
        )
        student.backward((gradient / rows).to(student.dtype))
        return torch.stack((figures.loss, figures.divergence, figures.agreeing.to(torch.float32)))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._half is None:
            return contextlib.nullcontext()
        return torch.autocast(self._target.device.type, dtype=self._half)
