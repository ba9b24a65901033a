"""The loss, its gradient, steps of the optimiser, and what is learnt from."""

from __future__ import annotations

import numpy
import pytest
import torch

from peerllm.engine.distill import loss as losses
from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.loss import distribution_loss
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.student import (
    count_tokens,
    expected_tokens,
    make_student,
    most_used,
    trained_parameters,
)
from peerllm.engine.distill.training import Trainer, batches, rate_at
from peerllm.engine.distill.whole import padded, rows_of
from peerllm.protocol.errors import NonFinite, NotEnoughMemory
from tests.engine.distill.conftest import load_whole

RECIPE = Recipe(layers=2, init_from=(0, 2), vocab_top=100, step_tokens=400)


def samples(count: int, *, seed: int = 0, longest: int = 40) -> list[Sample]:
    chance = numpy.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(chance.integers(6, longest))
        found.append(Sample(chance.integers(3, 300, length).astype(numpy.int32), int(chance.integers(1, 5)), 0.0, 0))
    return found


def trainer(part, *, micro_tokens: int = 10_000) -> Trainer:
    student = make_student(part, RECIPE, list(range(0, 300, 3)))
    return Trainer(student, part, RECIPE, length=64, micro_tokens=micro_tokens)


def test_the_gradient_is_that_of_the_cross_entropy_with_the_whole_distribution(monkeypatch):
    torch.manual_seed(1)
    rows, width, vocabulary = 37, 16, 90
    tokens = torch.tensor(sorted(torch.randperm(vocabulary)[:30].tolist()))
    teacher, teacher_head = torch.randn(rows, width), torch.randn(vocabulary, width)
    student, head = torch.randn(rows, width, requires_grad=True), torch.randn(len(tokens), width)
    p = torch.softmax(teacher @ teacher_head.t(), dim=1)[:, tokens]
    expected = -(p * torch.log_softmax(student @ head.t(), dim=1)).sum()
    expected.backward()
    expected = expected.detach()
    # Several pieces, of which the last is smaller.
    monkeypatch.setattr(losses, "_CPU_PIECE_ELEMENTS", 10 * vocabulary)
    figures, gradient = distribution_loss(student.detach(), teacher, head, teacher_head, tokens)
    assert float(figures.loss) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(gradient, student.grad, atol=1e-5)
    entropy = -(p * p.log()).sum().detach()
    assert float(figures.divergence) == pytest.approx(float(expected - entropy), rel=1e-4)


def test_a_student_that_is_the_target_diverges_nowhere_and_agrees_everywhere(target):
    part = load_whole(target)
    recipe = Recipe(layers=3, init_from=(0, 1, 2), vocab_top=304)
    student = make_student(part, recipe, list(range(304)))
    figures = Trainer(student, part, recipe, length=64, micro_tokens=500).step(samples(8), 0.0)
    assert figures.divergence == pytest.approx(0.0, abs=1e-4)
    assert figures.agreement == 1.0


def test_only_layers_and_norm_are_trained_and_the_target_stays_as_it_was(target):
    part = load_whole(target)
    before = {name: value.clone() for name, value in part.named_parameters()}
    made = trainer(part)
    student = made.student
    embedding, head = student.embed.weight.clone(), student.head.weight.clone()
    began = {name: value.detach().clone() for name, value in trained_parameters(student).items()}
    for step in range(3):
        made.step(samples(6, seed=step), 0.3)
    assert all(torch.equal(value, before[name]) for name, value in part.named_parameters())
    assert torch.equal(student.embed.weight, embedding) and torch.equal(student.head.weight, head)
    assert all(not torch.equal(value, began[name]) for name, value in trained_parameters(student).items())
    assert set(began) == {name for name in began if name.startswith("model.layers.") or name == "model.norm.weight"}


def test_the_student_begins_as_the_layers_it_is_told_to(target):
    part = load_whole(target)
    student = make_student(part, Recipe(layers=2, init_from=(2, 0), vocab_top=10), list(range(10)))
    for own, source in ((0, 2), (1, 0)):
        assert torch.equal(student.layers[own].mlp.up_proj.weight, part.layers[source].mlp.up_proj.weight)


def test_a_batch_in_pieces_steps_as_a_whole_one_does(target):
    """Also where memory ends in the middle: the pieces become smaller and nothing is counted twice."""
    part = load_whole(target)
    some = samples(12)
    whole, small, tried = trainer(part), trainer(part, micro_tokens=90), trainer(part, micro_tokens=200)
    real = tried._micro_step
    calls: list[int] = []

    def scarce(pieces, rows):
        calls.append(len(pieces))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(pieces, rows)

    tried._micro_step = scarce
    for _ in range(2):
        figures = [made.step(some, 0.5, 1000) for made in (whole, small, tried)]
    assert tried.micro_tokens == 100 and calls[0] > calls[2] > 0
    assert figures[1].loss == pytest.approx(figures[0].loss, rel=1e-5)
    assert figures[2].loss == pytest.approx(figures[0].loss, rel=1e-5)
    for name, value in trained_parameters(whole.student).items():
        for made in (small, tried):
            assert torch.allclose(trained_parameters(made.student)[name], value, atol=1e-4), name


def test_memory_that_does_not_hold_one_answer_is_an_error_in_words(target):
    made = trainer(load_whole(target))

    def never(pieces, rows):
        raise torch.OutOfMemoryError("no memory")

    made._micro_step = never
    with pytest.raises(NotEnoughMemory):
        made.step(samples(3), 0.5)


def test_a_loss_that_is_no_number_changes_no_weight(target):
    part = load_whole(target)
    made = trainer(part)
    part.norm.weight[3] = float("nan")
    before = {name: value.detach().clone() for name, value in trained_parameters(made.student).items()}
    with pytest.raises(NonFinite):
        made.step(samples(3), 0.5)
    assert all(torch.equal(value, before[name]) for name, value in trained_parameters(made.student).items())


def test_padding_changes_no_row_that_counts(target):
    part = load_whole(target)
    some = samples(5)
    tokens, places = padded(some, part.device)
    with torch.no_grad():
        together = part(tokens, rows_of(tokens)).flatten(0, 1)[places]
        alone = [
            part(torch.from_numpy(each.tokens)[None].long(), rows_of(torch.zeros(1, len(each.tokens))))[0]
            for each in some
        ]
    expected = torch.cat([rows[each.start - 1 : -1] for rows, each in zip(alone, some, strict=True)])
    assert torch.allclose(together, expected, atol=1e-4)


def test_every_answer_is_in_one_step_and_no_step_is_too_large():
    some = samples(200, seed=3)
    steps = batches(some, 300, seed=1)
    assert sorted(id(sample) for step in steps for sample in step) == sorted(map(id, some))
    assert all(sum(len(sample.tokens) for sample in step) <= 300 for step in steps)
    assert batches(some, 300, seed=2) != steps == batches(some, 300, seed=1)
    widths = [max(len(s.tokens) for s in step) - min(len(s.tokens) for s in step) for step in steps]
    assert sorted(widths)[len(widths) // 2] <= 6, "answers of like length stand together"


def test_the_learning_rate_rises_by_steps_and_falls_by_progress():
    recipe = Recipe(layers=1, init_from=(0,), vocab_top=10, hours=1.0)
    rates = [rate_at(share, step, recipe) for share, step in ((0.1, 0), (0.1, 50), (0.1, 99), (0.5, 400), (1.5, 900))]
    assert rates[0] < rates[1] < rates[2] > rates[3] > rates[4] > 0
    assert rates[2] == pytest.approx(0.9 * recipe.learning_rate)
    short = Recipe(layers=1, init_from=(0,), vocab_top=10, tokens=1000, reuse=2, step_tokens=100)
    assert rate_at(0.0, 0, short) == short.learning_rate, "twenty steps are too few to rise in"


def test_the_head_has_the_tokens_that_are_used_most():
    some = [Sample(numpy.array([9, 9, 9, 9, 5, 5, 7, 5, 8], dtype=numpy.int32), 4, 0.0, 0)]
    counts = count_tokens(some, 20)
    assert counts[9] == 0 and counts[5] == 3, "the prompt's tokens do not count"
    assert most_used(counts, 3, always=[]) == [5, 7, 8]
    assert most_used(counts, 3, always=[2]) == [2, 5, 7]
    assert most_used(counts, 6, always=[]) == [0, 1, 2, 5, 7, 8], "unused ones in the order of their ids"


def test_what_the_target_would_have_said_counts_beside_what_it_said(target):
    part = load_whole(target)
    found = expected_tokens(part, samples(40))
    assert found.shape == (304,) and (found > 0).all()
    assert found.sum() == pytest.approx(sum(sample.answer_tokens for sample in samples(40)), rel=1e-4)
