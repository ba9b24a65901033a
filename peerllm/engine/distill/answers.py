"""The target's answers: every slot of the batch is kept busy, from one prompt to the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy

from peerllm.engine.batch import BatchDecoder
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.prompts import PromptFile, Turns, is_held_out
from peerllm.protocol.errors import ModelError

_PROMPT_TEMPERATURE = 1.0
"""Prompts of the target's own are plain samples: greedy ones would all be the same."""
_MOST_BARREN = 64
"""Texts for each slot that may end before there is any answer to learn from."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Sequence numbers to seeds: odd, so that no two of a run share one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the target's answer to it."""

    tokens: numpy.ndarray
    """int32, all of them."""
    start: int
    """Where the answer begins."""
    temperature: float
    seed: int

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.start

    def prompt(self) -> list[int]:
        return self.tokens[: self.start].tolist()


def seed_of(run_seed: int, number: int) -> int:
    """64 bits for sequence `number` of a run."""
    return ((run_seed << 32) + number + 1) * _SEED_STRIDE % (1 << 64)


@dataclass(slots=True)
class _Work:
    number: int
    temperature: float
    start: int | None
    """Where the answer begins; None while the target still says the prompt."""


class AnswerMaker:
    """Answers without end, in the order in which they are done.

    Args:
        first_number: of the first sequence; a run that goes on takes up where it was.
        excluded: prompts that are used to judge and never to train.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        source: Turns | PromptFile,
        recipe: Recipe,
        *,
        first_number: int = 0,
        excluded: Collection[tuple[int, ...]] = (),
    ) -> None:
        self._decoder = decoder
        self._source = source
        self._recipe = recipe
        self._excluded = set(excluded)
        self._work: dict[int, _Work] = {}
        self.next_number = first_number
        self.drawn = 0
        """Tokens chosen by the target, prompts of its own included."""
        self.seconds = 0.0

    def make(
        self, count: int, tick: Callable[[float], None], *, most_seconds: float = math.inf
    ) -> tuple[list[Sample], list[Sample]]:
        """Answers of `count` tokens and some more: those to train on, and those that are held out.

        Args:
            tick: called between windows with the share that is done; what it raises ends the work, which goes on with
                the next call.
            most_seconds: after so long it is enough, if there is any answer.
        """
        found: list[Sample] = []
        held_out: list[Sample] = []
        made = barren = 0
        until = time.perf_counter() + most_seconds
        while made < count:
            tick(made / count)
            began = time.perf_counter()
            if found and began > until:
                break
            self._fill()
            going_on: list[tuple[int, _Work]] = []
            if barren > _MOST_BARREN * self._decoder.slots:
                raise ModelError(
                    f"the target ended {barren} texts without an answer to learn from: its prompts do not end within "
                    "--prompt-tokens, or its answers are empty"
                )
            for slot in self._decoder.run():
                work = self._work.pop(slot)
                text = self._decoder.text(slot)
                barren += not found
                if work.start is None:
                    self._prompt_done(slot, work, text, going_on)
                    continue
                self.drawn += len(text) - work.start
                if len(text) <= work.start:
                    continue
                sample = Sample(text, work.start, work.temperature, seed_of(self._recipe.seed, work.number))
                prompt = sample.prompt()
                if is_held_out(prompt, self._recipe.held_out_every):
                    held_out.append(sample)
                elif tuple(prompt) not in self._excluded:
                    found.append(sample)
                    made += sample.answer_tokens
            self._answer(going_on)
            self.seconds += time.perf_counter() - began
        return found, held_out

    def _fill(self) -> None:
        slots = self._decoder.idle()
        if not slots:
            return
        prompts, temperatures, lengths, numbers = [], [], [], []
        for slot in slots:
            number, self.next_number = self.next_number, self.next_number + 1
            work = _Work(number, self._recipe.temperatures[number % len(self._recipe.temperatures)], None)
            if isinstance(self._source, Turns):
                prompts.append(list(self._source.opener))
                temperatures.append(_PROMPT_TEMPERATURE)
                # One more for the token that ends the words, which is the closer's first.
                lengths.append(self._recipe.prompt_tokens - len(self._source.closer) + 1)
            else:
                prompt = self._source.prompt(number, self._recipe.seed)
                work.start = len(prompt)
                prompts.append(prompt)
                temperatures.append(work.temperature)
                lengths.append(len(prompt) + self._recipe.answer_tokens)
            numbers.append(number)
            self._work[slot] = work
        seeds = [seed_of(self._recipe.seed, number) for number in numbers]
        self._decoder.begin(slots, prompts, temperatures=temperatures, seeds=seeds, lengths=lengths)

    def _prompt_done(self, slot: int, work: _Work, text: numpy.ndarray, going_on: list[tuple[int, _Work]]) -> None:
        """A prompt that ended by itself and says something is answered; others make place for the next."""
        turns = self._source
        if not isinstance(turns, Turns):
            raise RuntimeError("prompts of a file are not said by the target")
        self.drawn += len(text) - len(turns.opener)
        if text[-1] == turns.closer[0] and len(text) > len(turns.opener) + 1:
            work.start = len(text) + len(turns.closer) - 1
            going_on.append((slot, work))

    def _answer(self, going_on: list[tuple[int, _Work]]) -> None:
        if not going_on or not isinstance(self._source, Turns):
            return
        self._decoder.go_on(
            [slot for slot, _ in going_on],
            [self._source.closer[1:]] * len(going_on),
            temperatures=[work.temperature for _, work in going_on],
            lengths=[(work.start or 0) + self._recipe.answer_tokens for _, work in going_on],
        )
        self._work.update(going_on)


def answer_prompts(
    decoder: BatchDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    tokens: int,
    tick: Callable[[], None],
    seed: int = 0,
) -> list[Sample]:
    """An answer of at most `tokens` to each prompt at its temperature, by an idle decoder; in the prompts' order."""
    found: dict[int, Sample] = {}
    working: dict[int, int] = {}
    waiting = list(range(len(prompts)))
    while waiting or working:
        tick()
        slots = decoder.idle()[: len(waiting)]
        some, waiting = waiting[: len(slots)], waiting[len(slots) :]
        if some:
            working.update(zip(slots, some, strict=True))
            decoder.begin(
                slots,
                [prompts[index] for index in some],
                temperatures=[temperatures[index] for index in some],
                seeds=[seed_of(seed, index) for index in some],
                lengths=[len(prompts[index]) + tokens for index in some],
            )
        for slot in decoder.run():
            index = working.pop(slot)
            text, start = decoder.text(slot), len(prompts[index])
            found[index] = Sample(text, start, temperatures[index], seed_of(seed, index))
    return [found[index] for index in sorted(found)]
