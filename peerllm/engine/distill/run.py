"""A distillation from the first check to the finished draft, in one stretch or several."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from peerllm.engine.batch import MOST_SLOTS, BatchDecoder
from peerllm.engine.distill import checkpoint, gain, reporting
from peerllm.engine.distill.answers import AnswerMaker, Sample, answer_prompts
from peerllm.engine.distill.checkpoint import RunState
from peerllm.engine.distill.evaluation import draft_along, evaluate
from peerllm.engine.distill.files import replace_text
from peerllm.engine.distill.folder import export_hf, write_draft
from peerllm.engine.distill.options import Recipe, Settings, make_recipe
from peerllm.engine.distill.plot import run_chart
from peerllm.engine.distill.prompts import PromptFile, Turns, check_trainable, unseen_prompts
from peerllm.engine.distill.student import count_tokens, expected_tokens, make_student, most_used
from peerllm.engine.distill.target import check_disk, find_prompts, find_target, load_target
from peerllm.engine.distill.training import StepFigures, Trainer, batches
from peerllm.engine.distill.whole import rows_of
from peerllm.engine.slice import ModelSlice
from peerllm.engine.weights import Progress
from peerllm.protocol.errors import BadRequest, EngineError, ModelError, ModelMismatch

_CPU_SLOTS = 16
_GPU_MICRO_TOKENS, _CPU_MICRO_TOKENS = 32768, 4096
_EVALUATED_TOKENS = 128
_SAMPLED = 0.8
_STATUS_SECONDS = 15.0
_MOST_POOL_TOKENS = 64 << 20
"""Answers that are kept to be trained on again, in the host's memory: a quarter of a gibibyte."""
_SMOOTH = 0.95
_WAVE_SHARE = 0.1
_WAVE_SECONDS = 120.0
"""A slow machine trains on what it has after so long: a stretch that ends loses the answers that were under way."""


class Stopped(Exception):
    """The stretch ends here, between two pieces of work."""


class Distillation:
    """One stretch of a run.

    Args:
        wishes: what the user said of the recipe, by `Recipe`'s names; None where nothing was said.
        say: gets lines for the user.
        progress: gets what takes long before the run begins.
        is_stopping: asked between pieces of work.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        settings: Settings,
        wishes: dict[str, Any],
        *,
        say: Callable[[str], None],
        progress: Progress,
        is_stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._say = say
        self._progress = progress
        self._is_stopping = is_stopping
        self._clock = clock
        self._began = clock()
        self._last_report = self._last_status = self._began
        self._recent: StepFigures | None = None
        self._pool: list[Sample] = []
        self._save_error: ModelError | None = None
        if settings.threads is not None:
            torch.set_num_threads(max(1, settings.threads))
        self.target = find_target(settings, progress)
        self.state, self._is_new = self._state_of(wishes)
        self._source = find_prompts(self.target, settings, self.state.recipe)
        recipe = self.state.recipe = self._with_prompts(self.state.recipe)
        check_disk(settings.out, self.target, recipe)
        self.part = load_target(self.target, settings, self._is_finite, progress)
        self._decoder = self._make_decoder(recipe)
        self._seconds_before = self.state.seconds
        self._trainer: Trainer | None = None
        self._maker = AnswerMaker(self._decoder, self._source, recipe, first_number=self.state.next_number)

    # --- Before ---------------------------------------------------------------------------------------------------

    def _state_of(self, wishes: dict[str, Any]) -> tuple[RunState, bool]:
        """The run to go on with, or a new one; and whether it is new."""
        out, said = self._settings.out, {name: value for name, value in wishes.items() if value is not None}
        is_new = not checkpoint.has_checkpoint(out)
        if is_new and not checkpoint.is_fresh(out):
            raise BadRequest(f"{out} is not empty and holds no run; name another folder with --out")
        checkpoint.lock(out)
        if is_new:
            known = {name: said.pop(name, None) for name in ("layers", "init_from", "vocab_top")}
            recipe = make_recipe(self.target.shape, **known, **said)
            return RunState(recipe=recipe, identity=self.target.identity, tokens=[]), True
        if not self._settings.resume:
            raise BadRequest(f"{out} holds a run already; go on with it by --resume, or name another folder with --out")
        state = checkpoint.load_state(out)
        differences = state.identity.differences(self.target.identity)
        if differences:
            raise ModelMismatch(f"the run in {out} is for another target; they differ in {', '.join(differences)}")
        for name, value in said.items():
            if getattr(state.recipe, name) != value:
                raise BadRequest(
                    f"the run in {out} was begun with {name} {getattr(state.recipe, name)}; a run keeps its recipe"
                )
        state.stretches += 1
        return state, False

    def _with_prompts(self, recipe: Recipe) -> Recipe:
        digest = self._source.digest if isinstance(self._source, PromptFile) else None
        if not self._is_new and recipe.prompts != digest:
            raise BadRequest("the run was begun with other prompts; a run keeps its recipe")
        return replace(recipe, prompts=digest)

    @torch.inference_mode()
    def _is_finite(self, part: ModelSlice) -> bool:
        """Whether the target's logits of some prompts are finite in the dtype that it was loaded in."""
        recipe = self.state.recipe
        prompts = unseen_prompts(self.target.tokenizer, 8, most=recipe.prompt_tokens) or [[0]]
        part.prepare(max(len(prompt) for prompt in prompts))
        return all(
            bool(torch.isfinite(part.logits(part(tokens, rows_of(tokens)))).all())
            for prompt in prompts
            for tokens in [torch.tensor([prompt], device=part.device)]
        )

    def _make_decoder(self, recipe: Recipe) -> BatchDecoder:
        wanted = self._settings.slots or (_CPU_SLOTS if self.part.device.type == "cpu" else MOST_SLOTS)
        shared: list[int] = []
        stops = set(self.target.stops)
        if isinstance(self._source, Turns):
            shared = list(self._source.opener)
            stops.add(self._source.closer[0])
        decoder = BatchDecoder.fitting(
            self.part,
            slots=max(1, min(wanted, MOST_SLOTS)),
            capacity=recipe.prompt_tokens + max(recipe.answer_tokens, _EVALUATED_TOKENS) + 1,
            stops=sorted(stops),
            shared=shared,
        )
        if decoder.slots < wanted:
            self._say(f"There is memory for {decoder.slots} answers at once.")
        return decoder

    # --- The run ----------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Works until the recipe is done or the stretch ends; then writes the draft. Gives whether the run is done.

        Raises:
            ModelError: the last checkpoint could not be written.
            EngineError: the target's or the student's figures are not finite.
        """
        recipe, state = self.state.recipe, self.state
        self._say(self._intent())
        if state.is_done:
            self._say("The run is done; its draft is measured and written again.")
            self._trainer = self._make_trainer()
            self._finish()
            return True
        try:
            wave = self._prepare()
            if self._is_new:
                self._report()
            while not state.is_done:
                self._train(wave)
                if state.progress() >= 1.0 or (recipe.hours is None and state.made >= recipe.tokens):
                    state.is_done = state.steps > 0
                    break
                wave = self._make_wave()
        except Stopped:
            self._say("Stopping here.")
        except KeyboardInterrupt:
            self._say("Interrupted.")
        if self._trainer is None:
            earlier = "so there is no draft" if self._is_new else "and the draft of the earlier ones stands"
            self._say(f"Nothing was trained in this stretch, {earlier}.")
            return False
        if state.progress() >= 1.0 and not state.steps:
            raise BadRequest(
                f"--hours {recipe.hours:g} were over before the first step: this machine needs longer for this target"
            )
        self._finish()
        return state.is_done

    def _finish(self) -> None:
        """Raises ModelError where a file could not be written; the others are there."""
        self._report(is_last=True)
        if self._save_error is not None:
            raise self._save_error

    def _intent(self) -> str:
        recipe = self.state.recipe
        amount = f"{recipe.hours:g} hours" if recipe.hours else f"{reporting.count(recipe.tokens)} tokens"
        begun = "" if self._is_new else f"; stretch {self.state.stretches}, {self.state.progress():.0%} done before"
        return (
            f"Distilling {self.target.name} on {self.part.device} in {str(self.part.dtype).removeprefix('torch.')}: "
            f"{recipe.layers} layers begun from {', '.join(map(str, recipe.init_from))}, "
            f"a head of {recipe.vocab_top} tokens, {amount} of its answers, {self._decoder.slots} at once{begun}."
        )

    def _prepare(self) -> list[Sample]:
        """The first wave; on a new run also what the draft will be judged by, and the head's tokens from the wave."""
        recipe, state = self.state.recipe, self.state
        if self._is_new:
            self._answer_unseen()
        excluded = {tuple(sample.prompt()) for sample in state.unseen}
        check_trainable(self._source, recipe.held_out_every, excluded)
        self._maker = AnswerMaker(
            self._decoder, self._source, recipe, first_number=state.next_number, excluded=excluded
        )
        wave = self._make_wave()
        if self._is_new:
            usage = count_tokens(wave, self.target.shape.vocabulary) + expected_tokens(self.part, wave)
            state.tokens = most_used(usage, recipe.vocab_top, self.target.stops)
            kept = usage[numpy.array(state.tokens)].sum() / max(1.0, usage.sum())
            self._say(f"The head's {len(state.tokens)} tokens are {kept:.2%} of what the target said.")
        self._trainer = self._make_trainer()
        return wave

    def _make_trainer(self) -> Trainer:
        student = make_student(self.part, self.state.recipe, self.state.tokens)
        micro = _CPU_MICRO_TOKENS if self.part.device.type == "cpu" else _GPU_MICRO_TOKENS
        trainer = Trainer(student, self.part, self.state.recipe, length=self._decoder.capacity, micro_tokens=micro)
        if not self._is_new:
            checkpoint.load_into(self._settings.out, self.state, trainer)
        return trainer

    def _answer_unseen(self) -> None:
        """The target's answers to the hundred prompts, greedy and sampled."""
        most = self._settings.evaluation_prompts
        prompts = unseen_prompts(self.target.tokenizer, most, most=self.state.recipe.prompt_tokens)
        self.state.unseen = answer_prompts(
            self._decoder,
            [*prompts, *prompts],
            temperatures=[0.0] * len(prompts) + [_SAMPLED] * len(prompts),
            tokens=_EVALUATED_TOKENS,
            tick=self._tick,
        )

    def _make_wave(self) -> list[Sample]:
        recipe, state, maker = self.state.recipe, self.state, self._maker
        wanted = recipe.wave_tokens()
        if recipe.hours is None:
            wanted = max(1, min(wanted, recipe.tokens - state.made))
        seconds, drawn = maker.seconds, maker.drawn
        try:
            wave, held_out = maker.make(wanted, self._generating, most_seconds=self._wave_seconds())
        finally:
            state.generating_seconds += maker.seconds - seconds
            state.drawn += maker.drawn - drawn
            state.next_number = maker.next_number
        state.made += sum(sample.answer_tokens for sample in wave)
        self._keep_held_out(held_out)
        return wave

    def _wave_seconds(self) -> float:
        """A wave takes a small part of what there is of time, so that most of it is left to learn from it."""
        most = _WAVE_SECONDS
        if self.state.recipe.hours is not None:
            most = min(most, _WAVE_SHARE * 3600 * self.state.recipe.hours)
        if self._settings.stop_after_minutes is not None:
            most = min(most, _WAVE_SHARE * 60 * self._settings.stop_after_minutes)
        return most

    def _keep_held_out(self, samples: list[Sample]) -> None:
        for sample in samples:
            alike = sum(each.temperature == sample.temperature for each in self.state.held_out)
            if sample.temperature in (0.0, _SAMPLED) and alike < self._settings.evaluation_prompts:
                end = sample.start + _EVALUATED_TOKENS
                self.state.held_out.append(Sample(sample.tokens[:end], sample.start, sample.temperature, sample.seed))

    def _train(self, wave: list[Sample]) -> None:
        """On the wave once, and on older answers as often as the recipe says."""
        recipe, state, trainer = self.state.recipe, self.state, self._trainer
        if trainer is None:
            raise RuntimeError("training comes after preparing")
        chance = random.Random(recipe.seed * 1_000_003 + state.steps)
        self._pool = [*self._pool, *wave]
        held = sum(len(sample.tokens) for sample in self._pool)
        while held > _MOST_POOL_TOKENS:
            held -= len(self._pool.pop(0).tokens)
        again = chance.choices(self._pool, k=len(wave) * (recipe.reuse - 1)) if self._pool else []
        for step in batches([*wave, *again], recipe.step_tokens, chance.getrandbits(32)):
            self._tick()
            if recipe.hours is not None and state.progress() >= 1.0:
                break  # the rate has come down to nothing
            began = self._clock()
            figures = trainer.step(step, state.progress(), state.steps)
            state.training_seconds += self._clock() - began
            state.trained += figures.tokens
            state.steps += 1
            self._recent = figures if self._recent is None else _smoothed(self._recent, figures)

    # --- Between pieces of work -------------------------------------------------------------------------------------

    def _generating(self, share: float) -> None:
        if self._trainer is None:
            self._progress("the target makes its first answers", share)
        self._tick()

    def _tick(self) -> None:
        """Stops, reports and saves when it is time. Raises Stopped."""
        now = self._clock()
        self.state.seconds = self._seconds_before + now - self._began
        limit = self._settings.stop_after_minutes
        if self._is_stopping() or (limit is not None and now - self._began >= 60 * limit):
            raise Stopped
        if self._trainer is None:
            return
        if now - self._last_report >= self._settings.report_seconds:
            self._report()
        elif now - self._last_status >= _STATUS_SECONDS:
            self._last_status = now
            self._say(reporting.status_line(self._figures()))

    def _figures(self) -> dict[str, Any]:
        state, recent = self.state, self._recent
        return {
            "progress": state.progress(),
            "seconds": state.seconds,
            "made": state.made,
            "trained": state.trained,
            "steps": state.steps,
            "tokens_per_second": state.drawn / max(1e-9, state.generating_seconds),
            "training_tokens_per_second": state.trained / max(1e-9, state.training_seconds) if state.trained else 0.0,
            "loss": None if recent is None else recent.loss,
            "divergence": None if recent is None else recent.divergence,
        }

    def _report(self, *, is_last: bool = False) -> None:
        """Evaluates, says how it stands, and writes checkpoint and draft."""
        settings, state, trainer = self._settings, self.state, self._trainer
        if trainer is None:
            raise RuntimeError("a report comes after preparing")
        report = self._figures()
        evaluations: dict[str, Any] = {}
        draftings = {}
        for name, samples in (("unseen", state.unseen), ("held out", state.held_out)):
            for words, temperature in (("greedy", 0.0), (f"at {_SAMPLED:g}", _SAMPLED)):
                some = [each for each in samples if each.temperature == temperature and each.answer_tokens > 0]
                if some:
                    draftings[f"{name}, {words}"] = draft_along(trainer.student, some)
                    evaluations[f"{name}, {words}"] = evaluate(draftings[f"{name}, {words}"]).to_map()
        report["evaluations"] = evaluations
        state.reports.append(report)
        self._say(reporting.status_line(report))
        for line in reporting.evaluation_lines(evaluations):
            self._say(line)
        figures: dict[str, Any] = dict(report)
        self._save_error = None
        # The checkpoint first: a draft without one could not go on, and measuring takes long.
        self._write(lambda: checkpoint.save(settings.out, state, trainer))
        self._write(lambda: write_draft(settings.out, trainer.student, self.target, state, figures))
        if settings.plot is not None:
            plot = settings.plot
            self._write(lambda: replace_text(plot, run_chart(f"A draft for {self.target.name}", state.reports)))
        if is_last and self._save_error is None:
            figures |= self._measure(settings.out, draftings)
            self._write(lambda: write_draft(settings.out, trainer.student, self.target, state, figures))
        if is_last and settings.export_hf is not None:
            exported = settings.export_hf
            self._write(lambda: export_hf(settings.out, self.target.folder, exported))
        self._last_report = self._last_status = self._clock()

    def _write(self, work: Callable[[], None]) -> None:
        """What cannot be written keeps nothing else from it: the run goes on with the older files.

        The disk may have room again at the next report.
        """
        try:
            work()
        except ModelError as error:
            self._save_error = error
            self._say(f"WARNING: {error.message}")

    def _measure(self, draft: Path, draftings: dict[str, Any]) -> dict[str, Any]:
        """Times and what they promise, said and given; nothing of it is worth losing a draft for."""
        found: dict[str, Any] = {}
        try:
            times = gain.measure_times(draft, self.target.folder, self.part)
            self._say(reporting.times_line(times))
            found["times"] = times.to_map()
            for name, each in draftings.items():
                gains = gain.gains(each, times)
                found.setdefault("gains", {})[name] = [one.to_map() for one in gains]
                for line in reporting.gain_lines(name, gains):
                    self._say(line)
            cost = gain.cpu_cost(draft, self.target.folder)
            self._say(reporting.cpu_line(cost))
            if cost is not None:
                found["cpu"] = cost.to_map()
        except (torch.OutOfMemoryError, EngineError, MemoryError) as error:
            self._say(f"Times could not be measured: {str(error).splitlines()[0]}")
        return found


def _smoothed(before: StepFigures, now: StepFigures) -> StepFigures:
    def mix(old: float, new: float) -> float:
        return _SMOOTH * old + (1 - _SMOOTH) * new

    return StepFigures(
        mix(before.loss, now.loss),
        mix(before.divergence, now.divergence),
        mix(before.agreement, now.agreement),
        now.tokens,
    )
