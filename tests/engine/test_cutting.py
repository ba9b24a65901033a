"""Top-k and top-p in plain torch without a look at the host: what `sampling.shape_logits` cuts off."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.drafting.model import candidate_probability
from peerllm.engine.sampling import choose, judge, shape_logits
from peerllm.protocol.requests import Sampling
from tests.engine import cuts

VOCABULARY = 300
KINDS = ("normal", "ties", "peaks", "flat")


def _survivors(row: torch.Tensor, sampling: Sampling) -> set[int]:
    """The definition, token by token, in float64."""
    scores = (row.float() / sampling.temperature).double()
    kept = set(range(len(row)))
    if 0 < sampling.top_k < len(row):
        kept = {token for token in kept if int((scores > scores[token]).sum()) < sampling.top_k}
    masses = {token: float((scores[token] - scores.max()).exp()) for token in kept}
    total = sum(masses.values())
    if sampling.top_p < 1.0:
        best = float(scores.max())
        greater = {
            token: sum(mass for other, mass in masses.items() if scores[other] > scores[token]) for token in kept
        }
        kept = {token for token in kept if float(scores[token]) == best or greater[token] < sampling.top_p * total}
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_are_those_with_less_than_p_of_the_mass_above_them(kind):
    samplings = [each for each in cuts.samplings(60) if not each.is_greedy]
    logits = cuts.logits_of(kind, len(samplings), 60)
    near = 0
    for row, sampling in zip(logits, samplings, strict=True):
        if cuts.is_near(row, sampling, 0):
            near += 1
            print("near a cut:", sampling)
            continue
        shaped = shape_logits(row[None], sampling)[0]
        assert set(torch.isfinite(shaped).nonzero()[:, 0].tolist()) == _survivors(row, sampling), sampling
    # Of a flat row, all its tokens are one tie.
    assert near <= 2


def test_tokens_that_tie_with_the_last_survivor_survive_whatever_their_order():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for order in (torch.arange(6), torch.tensor([4, 5, 1, 0, 3, 2])):
        for how in (Sampling(temperature=1.0, top_p=0.6), Sampling(temperature=1.0, top_k=2)):
            shaped = shape_logits(logits[:, order], how)
            assert torch.equal(torch.isfinite(shaped), logits[:, order] >= 2.0)


@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut_head", [False, True])
def test_rows_of_a_batch_are_cut_each_by_its_own_sampling(kind, device, cut_head):
    samplings = cuts.samplings(VOCABULARY)
    rows = len(samplings)
    ids = torch.arange(VOCABULARY) * 3 + 1 if cut_head else None
    logits = cuts.logits_of(kind, rows, VOCABULARY, seed=1)
    state = SamplingState.make(torch.arange(rows) * 7)
    for slot, each in enumerate(samplings):
        state.put(slot, each)
    slots = torch.arange(rows).flip(0)
    chooser = Chooser(vocabulary=VOCABULARY, tokens=ids, is_cutting=True)
    choose_all = chooser.choose if device == "cpu" else chooser._choose_in_graph
    expected = [
        int(choose(logits[row : row + 1], samplings[slot], torch.tensor([7 * slot + 1]), ids))
        for row, slot in enumerate(slots.tolist())
    ]
    assert choose_all(logits, slots, state)[0].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_verdict_and_the_draft_are_the_hosts(kind):
    for index, how in enumerate(cuts.samplings(VOCABULARY)):
        # The buffer has more columns than count, and rows of padding.
        logits = cuts.logits_of(kind, 6, VOCABULARY + 20, seed=index)
        state = SamplingState.make(torch.tensor([3, 40]))
        state.put(1, how)
        slots, counts = torch.tensor([1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        chooser = Chooser(vocabulary=VOCABULARY, is_cutting=True)
        looked_at = logits[:, :VOCABULARY]
        candidates = choose(looked_at, how, torch.arange(41, 47))[:5].to(torch.int32)
        candidates[3] = 299 - candidates[3]
        verdict = torch.zeros(3, dtype=torch.int32)
        chooser.judge(logits, 6, slots, state, candidates, counts, verdict)
        assert verdict.tolist() == [*judge(looked_at[:5], candidates[:4].tolist(), 40, how), 0]
        token, step = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        proposed, chances = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
        chooser.advance(logits[:1], slots, state, token, step, proposed, chances)
        assert int(token) == int(proposed[0]) == int(choose(looked_at[:1], how, torch.tensor([41])))
        assert float(chances[0]) == pytest.approx(float(candidate_probability(looked_at[:1], how)[0, int(token)]), 1e-5)


def test_a_cut_does_not_depend_on_the_other_rows():
    logits = cuts.logits_of("normal", 9, 5000, seed=5)
    state = SamplingState.make(torch.arange(9))
    for slot in range(9):
        state.put(slot, Sampling(temperature=1.0, top_p=0.9, seed=slot))
    chooser = Chooser(vocabulary=5000, is_cutting=True)
    together = chooser._choose_in_graph(logits, torch.arange(9), state)[0].tolist()
    alone = [int(chooser._choose_in_graph(logits[i : i + 1], torch.tensor([i]), state)[0]) for i in range(9)]
    assert together == alone
