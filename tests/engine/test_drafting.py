"""Drafters on their own."""

from __future__ import annotations

from peerllm.engine.drafting.base import shared_prefix
from peerllm.engine.drafting.ngram import NgramDrafter
from tests.engine.pairs import GREEDY


def test_look_up_proposes_what_followed_the_longest_match():
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 9, 9, 2, 3, 7, 7, 1, 2, 3]
    # [2, 3] was last followed by 7, but [1, 2, 3] by 9.
    assert drafter.propose(0, tokens, 4, 0.0, GREEDY).candidates == [9, 9, 2, 3]


def test_look_up_prefers_the_latest_place():
    assert NgramDrafter().propose(0, [5, 1, 5, 2, 5], 1, 0.0, GREEDY).candidates == [2]


def test_look_up_without_a_match_proposes_nothing():
    drafter = NgramDrafter()
    assert drafter.propose(0, [1, 2, 3], 4, 0.0, GREEDY).candidates == []
    assert drafter.propose(0, [1], 4, 0.0, GREEDY).candidates == []


def test_look_up_follows_the_sequence_as_it_grows_and_shrinks():
    drafter = NgramDrafter()
    drafter.propose(0, [1, 2], 2, 0.0, GREEDY)
    assert drafter.propose(0, [1, 2, 8, 1], 2, 0.0, GREEDY).candidates == [2, 8]
    assert drafter.propose(0, [1, 6, 1], 2, 0.0, GREEDY).candidates == [6, 1]


def test_look_up_keeps_slots_apart():
    drafter = NgramDrafter()
    drafter.propose(0, [1, 2, 3], 2, 0.0, GREEDY)
    assert drafter.propose(1, [4, 1], 2, 0.0, GREEDY).candidates == []


def test_look_up_learns_how_often_it_is_right():
    drafter = NgramDrafter()
    tokens = [1, 2, 1]
    first = drafter.propose(0, tokens, 1, 0.0, GREEDY).probabilities[0]
    for token in (3, 1, 4, 1, 5, 1, 6, 1):
        tokens = [*tokens, token]
        later = drafter.propose(0, tokens, 1, 0.0, GREEDY)
    assert later.probabilities[0] < first
    assert drafter.propose(0, [*tokens, 7, 1], 1, 0.5, GREEDY).candidates == []


def test_the_shared_prefix_is_the_longest():
    assert shared_prefix([], [1]) == 0
    assert shared_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    for place in range(40):
        other = list(range(40))
        other[place] = -1
        assert shared_prefix(list(range(40)), other) == place
