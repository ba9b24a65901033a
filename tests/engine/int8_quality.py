"""What int8 weights change over the test prompts: `python3 -m tests.engine.int8_quality [--every N]`, two minutes.

Each prompt, in the embedded model's chat template, is answered greedily by the whole unquantised model; then that model
and the int8 one read prompt and answer, and their most likely tokens are compared at every place. The template begins
all prompts alike: `Quality.distinct` counts those places once.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from peerllm.engine.engine import Engine
from peerllm.models import embedded
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import ChatMessage
from tests import tiny_models
from tests.engine.test_embedded_grid import QUESTIONS

PROMPTS = (*tiny_models.PROMPTS, *QUESTIONS)
ANSWER_TOKENS = 64
_CONTEXT = 256


@dataclass(frozen=True)
class Reading:
    """One prompt with its answer, read by both models."""

    prompt: str
    tokens: list[int]
    prompt_tokens: int
    same: torch.Tensor
    """bool `[tokens]`: whether both find the same next token most likely after each."""
    losses: tuple[torch.Tensor, torch.Tensor]
    """Of the unquantised and the int8 model, `[tokens - 1]`: minus the log probability of each next token."""

    @property
    def share(self) -> float:
        return float(self.same.float().mean())

    @property
    def perplexities(self) -> tuple[float, float]:
        exact, small = (math.exp(float(each.mean())) for each in self.losses)
        return exact, small


@dataclass(frozen=True)
class Quality:
    """Of all readings together."""

    readings: list[Reading]

    @property
    def whole(self) -> tuple[int, int]:
        """(places with the same token, all places) of prompts and answers."""
        return _counted(each.same for each in self.readings)

    @property
    def distinct(self) -> tuple[int, int]:
        """The same with the template's beginning once."""
        columns = zip(*(each.tokens for each in self.readings), strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        return _counted(each.same if index == 0 else each.same[common:] for index, each in enumerate(self.readings))

    @property
    def answers(self) -> tuple[int, int]:
        """The same in places whose next token is the answer's."""
        return _counted(each.same[each.prompt_tokens - 1 : -1] for each in self.readings)

    @property
    def worst(self) -> Reading:
        return min(self.readings, key=lambda each: each.share)

    def log_perplexities(self, *, of_answers: bool = False) -> tuple[float, float]:
        """Of the unquantised and the int8 model: the mean loss over all next tokens, or the answers' alone."""
        exact, small = (
            float(torch.cat([each.losses[i][of_answers * (each.prompt_tokens - 1) :] for each in self.readings]).mean())
            for i in range(2)
        )
        return exact, small


def _counted(found: Iterable[torch.Tensor]) -> tuple[int, int]:
    joined = torch.cat(list(found))
    return int(joined.sum()), len(joined)


@torch.inference_mode()
def measure(folder: Path, prompts: Sequence[str] = PROMPTS) -> Quality:
    """int8 weights of the model in `folder` against transformers' own model, both in float32."""
    tokenizer = Tokenizer.load(folder)
    whole = tiny_models.load_whole(folder)
    layers = LayerRange(0, whole.config.num_hidden_layers)
    engine = Engine.load(folder, layers, context=_CONTEXT, dtype="float32", weights="int8")
    questions = [tokenizer.encode_chat([ChatMessage(role="user", content=prompt)]) for prompt in prompts]
    readings = []
    for prompt, question, answer in zip(prompts, questions, answers(whole, tokenizer, questions), strict=True):
        tokens = torch.tensor([*question, *answer])
        engine._cache.rewind(0, 0)
        logits = whole(tokens[None]).logits[0], engine.part.logits(engine._runner.forward(0, tokens))
        exact, small = (functional.cross_entropy(each[:-1], tokens[1:], reduction="none") for each in logits)
        same = logits[0].argmax(-1) == logits[1].argmax(-1)
        readings.append(Reading(prompt, tokens.tolist(), len(question), same, (exact, small)))
    return Quality(readings)


def answers(whole: PreTrainedModel, tokenizer: Tokenizer, questions: list[list[int]]) -> list[list[int]]:
    """Greedy ones of at most ANSWER_TOKENS tokens, the one that ends them included; all questions as one batch."""
    width = max(map(len, questions))
    rows = torch.tensor([[0] * (width - len(each)) + each for each in questions])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in questions])
    ends = sorted(tokenizer.eos_token_ids)
    plain = GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0)
    whole.generation_config = GenerationConfig(pad_token_id=0)
    found = whole.generate(rows, generation_config=plain, attention_mask=mask)[:, width:].tolist()
    return [
        row[: next((place + 1 for place, token in enumerate(row) if token in ends), ANSWER_TOKENS)] for row in found
    ]


def table(quality: Quality) -> str:
    lines = [f"{'prompt':<42}{'places':>7}{'same':>6}{'share':>8}{'perplexity':>12}{'int8':>9}{'change':>8}"]
    for each in quality.readings:
        exact, small = each.perplexities
        lines.append(
            f"{ascii(each.prompt)[:40]:<42}{len(each.same):>7}{int(each.same.sum()):>6}{each.share:>8.1%}"
            f"{exact:>12.3f}{small:>9.3f}{small / exact - 1:>+8.2%}"
        )
    lines.append("")
    for label, (same, places) in (
        ("all places of prompts and answers", quality.whole),
        ("the template's beginning counted once", quality.distinct),
        ("answers alone", quality.answers),
    ):
        lines.append(f"{label}: the same top token in {same} of {places}, {same / places:.2%}")
    worst = quality.worst
    lines.append(f"worst prompt: {worst.prompt!a}, {worst.share:.2%}")
    for label, of_answers in (("all", False), ("answers", True)):
        exact, small = quality.log_perplexities(of_answers=of_answers)
        lines.append(
            f"perplexity, {label}: {math.exp(exact):.3f} to {math.exp(small):.3f}, {math.expm1(small - exact):+.2%}; "
            f"log perplexity {small - exact:+.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tests.engine.int8_quality", description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one prompt in N alone")
    print(table(measure(embedded.folder(), PROMPTS[:: parser.parse_args().every])))


if __name__ == "__main__":
    main()
