import random

import pytest

from peerllm.decoding.draft_length import AdaptiveDraftLength, FixedDraftLength


def run(
    policy: AdaptiveDraftLength, *, acceptance: float, base: float, slope: float, rounds: int = 600
) -> tuple[float, float]:
    """(tokens a second with the policy, without speculation) in a simulated round of `base + slope * K` seconds."""
    chance = random.Random(7)
    tokens, seconds = 0, 0.0
    for _ in range(rounds):
        drafted, _ = policy.choose()
        accepted = 0
        while accepted < drafted and chance.random() < acceptance:
            accepted += 1
        took = (base + slope * drafted) * chance.uniform(0.97, 1.06)
        policy.observe([0.5] * drafted, accepted, took)
        tokens += accepted + 1
        seconds += took
    return tokens / seconds, 1 / (base * 1.015)


@pytest.mark.parametrize(("base", "slope"), [(0.1, 0.005), (0.1, 0.02), (0.02, 0.02), (0.3, 0.03)])
def test_speculation_is_never_much_slower_than_plain_decoding(base: float, slope: float) -> None:
    # bugs.md 15: a fixed K made speculation 40% slower than none.
    for acceptance in (0.0, 0.05, 0.2):
        rate, plain = run(AdaptiveDraftLength(16), acceptance=acceptance, base=base, slope=slope)
        assert rate > 0.95 * plain, (acceptance, rate, plain)


def test_a_good_draft_over_a_slow_network_drafts_far() -> None:
    rate, plain = run(AdaptiveDraftLength(16), acceptance=0.85, base=0.1, slope=0.004)
    assert rate > 3.5 * plain


def test_a_fixed_length_stays() -> None:
    policy = FixedDraftLength(8)
    policy.observe([0.5] * 8, 0, 1.0)
    assert policy.choose() == (8, 0.0)


def test_a_costly_but_sure_draft_is_found_again_after_slow_rounds() -> None:
    policy = AdaptiveDraftLength(16)
    for _ in range(3):
        policy.choose()
        policy.observe([0.5] * 4, 4, 5.0)  # something else held the machine
    rate, plain = run(policy, acceptance=0.99, base=0.18, slope=0.09)
    assert rate > 1.3 * plain


def test_the_time_of_a_round_that_says_nothing_is_left_out() -> None:
    policy = AdaptiveDraftLength(16)
    policy.observe([0.5] * 4, 4, None)
    policy.observe([0.5] * 4, 4, 0.2)
    policy.observe([0.5] * 2, 2, 0.15)
    assert policy.choose()[0] > 0


def test_a_draft_that_is_right_but_unsure_is_believed() -> None:
    chance, policy = random.Random(3), AdaptiveDraftLength(16)
    lengths = []
    for _ in range(100):
        length, lowest = policy.choose()
        probabilities = []
        while len(probabilities) < length and (probability := chance.uniform(0.05, 0.9)) >= lowest:
            probabilities.append(probability)
        policy.observe(probabilities, len(probabilities), 0.165 + 0.08 * len(probabilities))
        lengths.append(len(probabilities))
    assert sum(lengths[50:]) / 50 > 6


def test_candidates_that_are_seldom_right_at_their_probability_are_left_out() -> None:
    chance, policy = random.Random(3), AdaptiveDraftLength(16)
    passed = []
    for _ in range(200):
        length, lowest = policy.choose()
        passed.append(lowest <= 0.15)
        probabilities: list[float] = []
        while len(probabilities) < length and (probability := chance.choice((0.15, 0.95))) >= lowest:
            probabilities.append(probability)
        accepted = next(
            (i for i, p in enumerate(probabilities) if p < 0.5 and chance.random() < 0.9), len(probabilities)
        )
        policy.observe(probabilities, accepted, 0.165 + 0.05 * len(probabilities))
    assert sum(passed[20:]) < 60
