"""The draft in this package for the embedded model: it is that model's, small, and right more often than not."""

from __future__ import annotations

import numpy
import pytest
import torch

from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.evaluation import all_rounds, draft_along
from peerllm.engine.distill.prompts import unseen_prompts
from peerllm.engine.drafting.distilled import load_distilled
from peerllm.models import drafts, embedded
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.requests import Sampling
from tests.engine.pairs import GREEDY, Pair

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
TOKENS = 32


def test_the_embedded_models_draft_is_shipped_and_has_at_most_30_megabytes():
    draft = drafts.shipped_for(embedded.folder())
    assert draft is not None and draft == drafts.shipped(embedded.NAME)
    assert sum(path.stat().st_size for path in draft.iterdir()) <= 30_000_000
    figures = drafts.read_draft(draft).figures["evaluations"]
    assert figures["unseen, greedy"]["per_round"]["8"] >= 2.4
    assert figures["unseen, at 0.8"]["per_round"]["8"] >= 1.8


@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=0.8, seed=5)], ids=["greedy", "at 0.8"])
def test_real_rounds_with_it_say_the_plain_text_in_as_many_rounds_as_its_figures_promise(how):
    """Some of the hundred prompts that no run trains on. The card's figures are of forwards over whole answers."""
    folder = embedded.folder()
    draft = drafts.shipped(embedded.NAME)
    tokenizer = Tokenizer.load(folder)
    pair = Pair.load(folder, 15, layers=30, context=256, draft=f"model:{draft}")
    student = load_distilled(draft, folder, torch.float32, "cpu", progress=lambda *_: None)
    student.prepare(256)
    tokens = rounds = promised = 0
    for prompt in unseen_prompts(tokenizer, 100, most=96)[5::50]:
        plain = pair.generate(prompt, TOKENS, 0, how).tokens
        # The draft learnt answers, and not what would come after their end.
        count = next((place + 1 for place, token in enumerate(plain) if token in tokenizer.eos_token_ids), TOKENS)
        run = pair.generate(prompt, count, 8, how)
        assert run.tokens == plain[:count]
        whole = numpy.array([*prompt, *run.tokens], dtype=numpy.int32)
        promised += all_rounds(
            draft_along(student, [Sample(whole, len(prompt), how.temperature, how.seed or 0)]), 8
        ).rounds
        tokens, rounds = tokens + count, rounds + run.rounds
    print(f"{tokens} tokens in {rounds} rounds, {promised} promised")
    # A near tie between two candidates may be decided either way.
    assert abs(rounds - promised) <= 2
    assert tokens / rounds > 1.6
