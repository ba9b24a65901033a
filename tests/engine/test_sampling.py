"""The target's choice at each row, and how many candidates agree with it."""

import pytest
import torch

from peerllm.engine import sampling
from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.protocol.errors import NonFinite
from peerllm.protocol.requests import Sampling


def _logits(rows: int = 5, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_is_the_argmax():
    logits = _logits()
    assert torch.equal(sampling.choose(logits, Sampling(), torch.arange(5)), logits.argmax(-1))


def test_a_row_says_the_same_alone_as_in_a_block():
    logits = _logits()
    how = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=1 << 40)
    together = sampling.choose(logits, how, torch.arange(10, 15))
    alone = [int(sampling.choose(logits[i : i + 1], how, torch.tensor([10 + i]))) for i in range(5)]
    assert together.tolist() == alone


def test_top_k_keeps_the_k_best():
    shaped = sampling.shape_logits(_logits(), Sampling(temperature=1.0, top_k=7))
    assert torch.equal(torch.isfinite(shaped).sum(-1), torch.full((5,), 7))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    for top_p, kept in ((0.0, 1), (0.49, 1), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        shaped = sampling.shape_logits(logits, Sampling(temperature=1.0, top_p=top_p))
        assert int(torch.isfinite(shaped).sum()) == kept, top_p


def test_temperature_shapes_before_the_cut():
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    hot = sampling.shape_logits(logits, Sampling(temperature=2.0, top_p=0.65))
    cold = sampling.shape_logits(logits, Sampling(temperature=0.5, top_p=0.65))
    assert (int(torch.isfinite(hot).sum()), int(torch.isfinite(cold).sum())) == (2, 1)


def test_a_token_that_is_cut_off_is_never_drawn():
    logits = _logits(rows=1).expand(3000, 50)
    best = set(logits[0].topk(3).indices.tolist())
    drawn = sampling.choose(logits, Sampling(temperature=2.0, top_k=3, seed=5), torch.arange(3000))
    assert set(drawn.tolist()) == best


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused(bad):
    logits = _logits()
    logits[3, 7] = bad
    with pytest.raises(NonFinite):
        sampling.choose(logits, Sampling(), torch.arange(5))


@pytest.mark.parametrize(
    ("wrong_at", "accepted"), [(None, 4), (0, 0), (2, 2), (3, 3)], ids=["all right", "first", "third", "last"]
)
def test_the_longest_agreeing_prefix_is_accepted_and_the_targets_token_follows(wrong_at, accepted):
    logits = _logits()
    right = logits.argmax(-1).tolist()
    candidates = right[:4]
    if wrong_at is not None:
        candidates[wrong_at] = (candidates[wrong_at] + 1) % 50
    assert sampling.judge(logits, candidates, 17, Sampling()) == (accepted, right[accepted])


def test_a_later_agreement_does_not_count():
    logits = _logits()
    right = logits.argmax(-1).tolist()
    assert sampling.judge(logits, [49 - right[0], *right[1:4]], 0, Sampling())[0] == (right[0] == 49 - right[0])


def test_the_verdicts_noise_is_that_of_the_tokens_absolute_index():
    logits = _logits()
    how = Sampling(temperature=1.0, seed=3)
    expected = sampling.choose(logits, how, torch.arange(101, 106)).tolist()
    assert sampling.judge(logits, expected[:4], 100, how) == (4, expected[4])
    assert expected != sampling.choose(logits, how, torch.arange(100, 105)).tolist()


@pytest.mark.parametrize("temperature", [1e-7, 1e-38, 1e-300, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_temperature_that_would_leave_float32s_range_is_greedy(temperature, cut):
    logits = _logits()
    how = Sampling(temperature=temperature, seed=3, **cut)
    positions = torch.arange(7, 12)
    assert torch.equal(sampling.choose(logits, how, positions), logits.argmax(-1))
    state = SamplingState.make(torch.tensor([6]))
    state.put(0, how)
    for row, expected in zip(logits, logits.argmax(-1).tolist(), strict=True):
        chooser = Chooser(vocabulary=50, is_cutting=True)
        assert chooser.choose(row[None], torch.tensor([0]), state)[0].tolist() == [expected]
