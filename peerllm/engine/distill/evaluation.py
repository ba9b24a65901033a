"""How often the student says what the target said, on answers that it was not trained on.

A draft's candidate counts only while all before it were right, and then its context is the target's own text. So one
forward over an answer says everything that rounds would do: a round's accepted candidates are the run of places from
its start where the student agrees. Sampled answers were drawn with the noise of design.md, and the student draws with
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peerllm.engine import noise
from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.whole import normed_rows, padded
from peerllm.engine.drafting.distilled import CutSlice

DRAFT_LENGTHS = (4, 8)
STOP_LENGTH = 16
"""Most candidates where the draft stops by itself."""
STOP_PROBABILITY = 0.4
"""It stops before a candidate that it holds less likely."""
_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class Drafting:
    """One answer: at each place, whether the student's candidate is the target's token, and how likely it held it."""

    agrees: tuple[bool, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Counts over answers."""

    tokens: int
    rounds: int
    drafted: int

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / max(1, self.rounds)

    @property
    def drafted_per_round(self) -> float:
        return self.drafted / max(1, self.rounds)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one set of answers at one temperature."""

    answers: int
    tokens: int
    agreement: float
    """The share of places where the student's choice is the target's token."""
    per_round: dict[str, float]
    """Tokens per round: keys `4`, `8`, and `stop` for the draft's own stopping probability."""
    drafted: dict[str, float]
    """Candidates per round, by the same keys."""

    def to_map(self) -> dict[str, Any]:
        return asdict(self)


def rounds_of(drafting: Drafting, length: int, stop: float = 0.0) -> Rounds:
    """What rounds of at most `length` candidates make of an answer; `stop` as `Drafter.propose`'s least probability.

    After a wrong candidate nobody knows how far the draft would have gone on; it is taken to use the whole length.
    """
    place, rounds, drafted = 0, 0, 0
    count = len(drafting.agrees)
    while place < count:
        most = min(length, count - place - 1)
        accepted = candidates = 0
        while candidates < most:
            here = place + candidates
            if drafting.probabilities[here] < stop:
                break
            if not drafting.agrees[here]:
                candidates = most
                break
            accepted += 1
            candidates += 1
        place += accepted + 1
        rounds += 1
        drafted += candidates
    return Rounds(count, rounds, drafted)


def all_rounds(draftings: Sequence[Drafting], length: int, stop: float = 0.0) -> Rounds:
    """Summed over answers."""
    each = [rounds_of(drafting, length, stop) for drafting in draftings]
    return Rounds(sum(x.tokens for x in each), sum(x.rounds for x in each), sum(x.drafted for x in each))


def evaluate(draftings: Sequence[Drafting]) -> Evaluation:
    """Figures of these answers."""
    tokens = sum(len(each.agrees) for each in draftings)
    found = {str(length): all_rounds(draftings, length) for length in DRAFT_LENGTHS}
    found["stop"] = all_rounds(draftings, STOP_LENGTH, STOP_PROBABILITY)
    return Evaluation(
        answers=len(draftings),
        tokens=tokens,
        agreement=sum(sum(each.agrees) for each in draftings) / max(1, tokens),
        per_round={name: rounds.tokens_per_round for name, rounds in found.items()},
        drafted={name: rounds.drafted_per_round for name, rounds in found.items()},
    )


@torch.no_grad()
def draft_along(student: CutSlice, samples: Sequence[Sample]) -> list[Drafting]:
    """What the student would have drafted at each place of each answer."""
    if student.head is None or student.head_tokens is None:
        raise RuntimeError("a student ends with a head of its own tokens")
    found: list[Drafting] = []
    longest = max((len(sample.tokens) for sample in samples), default=1)
    many = max(1, _ROWS // longest)
    for start in range(0, len(samples), many):
        some = samples[start : start + many]
        tokens, places = padded(some, student.device)
        hidden = normed_rows(student, tokens, places)
        first = 0
        for sample in some:
            rows = hidden[first : first + sample.answer_tokens]
            first += sample.answer_tokens
            logits = (rows.to(student.head.weight.dtype) @ student.head.weight.t()).to(torch.float32)
            found.append(_drafting(logits, sample, student.head_tokens))
    return found


def _drafting(logits: torch.Tensor, sample: Sample, tokens: torch.Tensor) -> Drafting:
    """Of the answer's logits `[answer tokens, head's tokens]`."""
    if sample.temperature > 0:
        logits = logits / sample.temperature
        positions = torch.arange(sample.start, len(sample.tokens), device=logits.device)
        columns = noise.perturb(logits, sample.seed, positions, tokens).argmax(dim=1)
    else:
        columns = logits.argmax(dim=1)
    said = torch.from_numpy(sample.tokens[sample.start :]).to(logits.device)
    agrees = tokens.index_select(0, columns) == said
    probabilities = torch.softmax(logits, dim=1).gather(1, columns[:, None])[:, 0]
    return Drafting(tuple(agrees.tolist()), tuple(probabilities.tolist()))
