"""Two engines face to face, in-process, and scripted drafters: what the engine's tests decode with."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peerllm.engine.drafting.base import Proposal
from peerllm.engine.engine import Engine
from peerllm.engine.sampling import scores_of
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling

GREEDY = Sampling()


@dataclass
class Run:
    """One answer and how it came about."""

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0


@dataclass
class Pair:
    """The first and the last slice of one model, and a loop that plays the daemons' part."""

    first: Engine
    last: Engine
    middle: list[Engine] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, *cuts: int, layers: int = 4, **options: object) -> Pair:
        edges = [0, *(cuts or (layers // 2,)), layers]
        draft = options.pop("draft", "none")
        engines = [
            Engine.load(folder, LayerRange(a, b), draft=draft if a == 0 else "none", **options)
            for a, b in itertools.pairwise(edges)
        ]
        return cls(engines[0], engines[-1], engines[1:-1])

    def open(self, session: int, sampling: Sampling, prompt: list[int], chunk: int = 128) -> None:
        for engine in (self.first, *self.middle, self.last):
            engine.open(session, sampling)
        for start in range(0, len(prompt) - 1, chunk):
            tokens = prompt[start : min(start + chunk, len(prompt) - 1)]
            payload = self.first.prefill(session, start, tokens=tokens).payload
            for engine in self.middle:
                payload = engine.forward(session, start, len(tokens), payload).payload
            done = self.last.prefill(session, start, rows=len(tokens), payload=payload)
            assert done.payload == b""

    def step(self, session: int, known: int, tokens: list[int], length: int, run: Run, stop_at: float = 0.0) -> None:
        """One round; `tokens` grows by what the verdict made final."""
        block = self.first.draft_block(session, known, tokens[known:], length, stop_at)
        payload = block.payload
        for engine in self.middle:
            payload = engine.forward(session, block.start, len(block.candidates) + 1, payload).payload
        verdict = self.last.verify(session, block.start, block.candidates, payload)
        run.rounds += 1
        run.drafted += len(block.candidates)
        run.accepted += verdict.accepted
        tokens += [*block.candidates[: verdict.accepted], verdict.next_token]

    def generate(
        self, prompt: list[int], count: int, length: int, sampling: Sampling = GREEDY, *, session: int = 1
    ) -> Run:
        """`count` tokens with blocks of at most `length` candidates."""
        self.open(session, sampling, prompt)
        tokens, known, run = list(prompt), 0, Run([])
        while (left := count - (len(tokens) - len(prompt))) > 0:
            before = len(tokens)
            self.step(session, known, tokens, min(length, left - 1), run)
            known = before
        run.tokens = tokens[len(prompt) :]
        return run


class Scripted:
    """Knows the answer. `mode`: always right, always wrong, or random."""

    byte_count = 0

    def __init__(self, mode: str, answer: list[int], vocabulary: int) -> None:
        self._mode = mode
        self._answer = answer
        self._vocabulary = vocabulary
        self._random = random.Random(7)

    def propose(self, slot, tokens, limit, min_probability, sampling):
        right = self._answer[len(tokens) : len(tokens) + limit]
        if self._mode == "right":
            candidates = right
        elif self._mode == "wrong":
            candidates = [(token + 1) % self._vocabulary for token in right]
        else:
            candidates = [
                token if self._random.random() < 0.5 else self._random.randrange(self._vocabulary) for token in right
            ]
        return Proposal(candidates, [1.0] * len(candidates))

    def forget(self, slot):
        pass


@dataclass
class Ties:
    """Counts places where the two best scores are so near that the order of a sum decides."""

    tolerance: float
    found: list[str] = field(default_factory=list)
    compared: int = 0

    def same(self, whole: PreTrainedModel, prompt: list[int], one: list[int], two: list[int], how: Sampling) -> bool:
        """Whether both answers are equal up to the first near tie at most; the reference model is the judge."""
        self.compared += 1
        if one == two:
            return True
        place = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
        with torch.inference_mode():
            logits = whole(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1:]
        scores = scores_of(logits, how, torch.tensor([len(prompt) + place])).float()
        best = scores[0].topk(2)
        gap = float(best.values[0] - best.values[1])
        line = f"tokens {one[place]} and {two[place]} at {place}: gap {gap:.2e}"
        print("near tie:", line)
        self.found.append(line)
        return gap < self.tolerance and {one[place], two[place]} == set(best.indices.tolist())
