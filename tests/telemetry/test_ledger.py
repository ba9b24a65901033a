"""The round ledger: what is counted, what is a median, and what is bounded."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from peerllm.protocol import limits
from peerllm.telemetry.ledger import PARTS, RoundLedger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def played(clock: Clock, *rounds: tuple[float, int, int, int]) -> RoundLedger:
    """Rounds of (seconds, drafted, accepted, tokens)."""
    ledger = RoundLedger(clock=clock)
    for seconds, drafted, accepted, tokens in rounds:
        clock.now += seconds
        ledger.add_round(drafted=drafted, accepted=accepted, tokens=tokens, network=seconds / 2, total=seconds)
    return ledger


def test_an_empty_ledger_has_no_figures(clock: Clock) -> None:
    assert RoundLedger(clock=clock).summary() == {
        "rounds": 0,
        "tokens": 0,
        "tokens_per_second": None,
        "acceptance_rate": None,
        "tokens_per_round": None,
        "time_to_first_token_ms": None,
        "medians_ms": dict.fromkeys(PARTS),
    }


def test_the_speed_is_that_after_the_first_round(clock: Clock) -> None:
    summary = played(clock, (2.0, 4, 4, 5), (0.5, 4, 2, 3), (0.5, 4, 1, 2)).summary()
    assert summary["time_to_first_token_ms"] == 2000.0
    assert summary["tokens_per_second"] == 5.0
    assert (summary["rounds"], summary["tokens"]) == (3, 10)
    assert summary["tokens_per_round"] == round(10 / 3, 4)
    assert summary["acceptance_rate"] == round(7 / 12, 4)


def test_one_round_has_no_speed_and_no_draft_has_no_acceptance(clock: Clock) -> None:
    summary = played(clock, (1.0, 0, 0, 1)).summary()
    assert summary["tokens_per_second"] is None
    assert summary["acceptance_rate"] is None


def test_times_are_medians_in_milliseconds(clock: Clock) -> None:
    ledger = RoundLedger(clock=clock)
    for value in (0.001, 0.002, 9.0):
        ledger.add_round(
            drafted=1, accepted=1, tokens=2, draft=value, own_layers=2 * value, encode=3 * value, network=4 * value,
            their_layers=5 * value, verdict=6 * value, total=7 * value,
        )  # fmt: skip
    assert ledger.summary()["medians_ms"] == {
        "draft": 2.0, "own_layers": 4.0, "encode": 6.0, "network": 8.0, "their_layers": 10.0, "verdict": 12.0,
        "total": 14.0,
    }  # fmt: skip


def test_the_start_may_lie_before_the_ledger(clock: Clock) -> None:
    ledger = RoundLedger(started=clock.now - 3.0, clock=clock)
    ledger.add_round(drafted=0, accepted=0, tokens=1)
    assert ledger.summary()["time_to_first_token_ms"] == 3000.0


def test_a_daemons_ledger_does_not_count_the_time_between_answers(clock: Clock) -> None:
    everything = RoundLedger(clock=clock)
    for _ in range(2):
        everything.include(played(clock, (1.0, 4, 4, 5), (0.5, 4, 0, 1)))
        clock.now += 3600.0
    summary = everything.summary()
    assert (summary["rounds"], summary["tokens"]) == (4, 12)
    assert summary["tokens_per_second"] == 2.0
    assert summary["time_to_first_token_ms"] == 1000.0
    assert summary["acceptance_rate"] == 0.5
    assert summary["medians_ms"]["total"] == 750.0


def test_memory_is_bounded_and_counts_go_on(clock: Clock) -> None:
    ledger = RoundLedger(clock=clock)

    def play(rounds: int) -> None:
        for _ in range(rounds):
            ledger.add_round(drafted=1, accepted=1, tokens=2, network=clock.now)

    play(limits.MAX_LEDGER_ROUNDS)
    tracemalloc.start()
    try:
        play(2 * limits.MAX_LEDGER_ROUNDS)
        assert tracemalloc.get_traced_memory()[0] < 1024 * 1024
        before = tracemalloc.get_traced_memory()[0]
        play(2 * limits.MAX_LEDGER_ROUNDS)
        assert tracemalloc.get_traced_memory()[0] < before + 64 * 1024
    finally:
        tracemalloc.stop()
    assert ledger.rounds == 5 * limits.MAX_LEDGER_ROUNDS


def test_a_summary_is_plain_json(clock: Clock) -> None:
    summary: dict[str, Any] = played(clock, (1.0, 4, 4, 5), (0.5, 4, 0, 1)).summary()
    assert json.loads(json.dumps(summary)) == summary
