"""Figures without rounds are those of rounds."""

from __future__ import annotations

import pytest

from peerllm.engine.batch import BatchDecoder
from peerllm.engine.distill.answers import answer_prompts, seed_of
from peerllm.engine.distill.evaluation import Drafting, all_rounds, draft_along, evaluate, rounds_of
from peerllm.engine.distill.gain import Times, gains
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.student import make_student
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.protocol.requests import Sampling
from tests.engine.distill.conftest import load_whole
from tests.engine.pairs import Pair

YES, NO = True, False


def drafting(*agrees: bool, probability: float = 1.0) -> Drafting:
    return Drafting(agrees, (probability,) * len(agrees))


def test_a_round_takes_the_run_of_right_candidates_and_one_token_more():
    found = rounds_of(drafting(YES, YES, NO, YES, YES, YES), 2)
    # Two right and the third token; then two right and the last; no candidate beyond what remains.
    assert (found.tokens, found.rounds, found.drafted) == (6, 2, 4)
    assert rounds_of(drafting(NO, NO, NO), 4).rounds == 3
    assert rounds_of(drafting(YES), 4).drafted == 0, "one token that remains needs no candidate"
    assert rounds_of(drafting(*[YES] * 9), 8).rounds == 1


def test_a_draft_that_stops_by_itself_wastes_no_candidate_it_holds_unlikely():
    unsure = Drafting((YES, YES, NO, YES), (0.9, 0.3, 0.9, 0.9))
    found = rounds_of(unsure, 8, stop=0.5)
    # One candidate and its token, then a wrong one: nobody knows how far it would have gone on.
    assert (found.rounds, found.drafted) == (3, 1 + 1 + 0)
    assert rounds_of(unsure, 8).rounds == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_per_round_are_those_of_real_rounds_with_the_student_as_the_draft(target, temperature):
    part = load_whole(target)
    student = make_student(part, Recipe(layers=2, init_from=(0, 2), vocab_top=200), list(range(200)))
    student.prepare(200)
    decoder = BatchDecoder(part, slots=3, capacity=100, stops=[1])
    prompts = [[0, 3, index + 10, 7] for index in range(6)]
    answers = answer_prompts(decoder, prompts, temperatures=[temperature] * 6, tokens=40, tick=lambda: None)
    assert [sample.prompt() for sample in answers] == prompts
    found = draft_along(student, answers)
    pair = Pair.load(target, 1, layers=3, context=128)
    pair.first.drafter = ModelDrafter(student, student.make_cache(slots=4, capacity=200), 304)
    agreed = 0
    for index, (sample, each) in enumerate(zip(answers, found, strict=True)):
        how = Sampling(temperature=temperature, seed=seed_of(0, index))
        for length in (1, 4, 8):
            run = pair.generate(sample.prompt(), sample.answer_tokens, length, how)
            assert run.tokens == sample.tokens[sample.start :].tolist()
            expected = rounds_of(each, length)
            assert (run.rounds, run.drafted) == (expected.rounds, expected.drafted)
        agreed += sum(each.agrees)
    assert 0 < agreed < sum(sample.answer_tokens for sample in answers)


def test_figures_are_means_over_all_answers():
    some = [drafting(YES, YES, YES, NO), drafting(NO, NO, probability=0.1)]
    found = evaluate(some)
    assert (found.answers, found.tokens) == (2, 6)
    assert found.agreement == pytest.approx(3 / 6)
    assert found.per_round["8"] == all_rounds(some, 8).tokens_per_round == pytest.approx(6 / 3)
    assert found.drafted["stop"] < found.drafted["8"]


def test_a_draft_gains_more_the_longer_the_round_trip_and_a_useless_one_is_left_out():
    times = Times(draft_token=1.0, blocks={1: 10.0, 9: 12.0, 17: 14.0})
    good = gains([drafting(*[YES] * 7, NO) for _ in range(4)], times)
    assert [gain.round_trip_ms for gain in good] == [20, 80, 160]
    assert 1.0 < good[0].times_plain < good[1].times_plain < good[2].times_plain
    assert good[1].plain_tokens_per_second == pytest.approx(1000 / 90)
    useless = gains([drafting(*[NO] * 20)], times)
    assert [(gain.length, gain.times_plain) for gain in useless] == [(0, 1.0)] * 3
