"""Silence, judged with a clock that the test holds; signs that come before it."""

from __future__ import annotations

from peerllm.link.liveness import TICK_SECONDS, Life, Liveness
from peerllm.link.watch import PathSigns


def judge_until(liveness: Liveness, begin: float, end: float) -> Life:
    """Asks at every tick, as the connection does."""
    life, now = Life.WELL, begin
    while now < end:
        now = min(end, now + TICK_SECONDS)
        life = liveness.judge(now)
    return life


def test_silence_is_suspect_after_three_seconds_and_down_after_ten() -> None:
    liveness = Liveness(100.0)
    assert judge_until(liveness, 100.0, 102.9) is Life.WELL
    assert judge_until(liveness, 102.9, 103.0) is Life.SUSPECT
    assert judge_until(liveness, 103.0, 109.9) is Life.SUSPECT
    assert judge_until(liveness, 109.9, 110.0) is Life.DOWN


def test_any_frame_counts() -> None:
    liveness = Liveness(0.0)
    assert judge_until(liveness, 0.0, 9.9) is Life.SUSPECT
    liveness.heard(9.9)
    assert judge_until(liveness, 9.9, 12.8) is Life.WELL


def test_after_a_stop_the_backlog_is_read_before_anything_is_judged() -> None:
    liveness = Liveness(0.0)
    assert liveness.judge(60.0) is Life.WELL  # SIGSTOP for a minute: the other side's pings lie in the socket
    assert judge_until(liveness, 60.0, 61.1) is Life.SUSPECT  # and when there were none, it is suspect soon


def test_a_sign_is_suspect_at_once_and_a_frame_ends_it() -> None:
    liveness = Liveness(0.0)
    liveness.suspect()
    assert liveness.judge(0.1) is Life.SUSPECT
    liveness.heard(0.2)
    assert liveness.judge(0.3) is Life.WELL


def test_a_ping_is_due_once_a_second() -> None:
    liveness = Liveness(0.0)
    asked = [liveness.is_ping_due(0.1 * step) for step in range(35)]
    assert asked.count(True) == 4


def test_an_address_that_comes_goes_or_changes_is_a_sign_once() -> None:
    signs = PathSigns(["10.0.0.1"], 0.0)
    assert signs.look(["10.0.0.1"], 0.0) is None
    assert signs.look(["10.0.0.2"], 0.0) == "addresses"
    assert signs.look(["10.0.0.2"], 0.0) is None
    assert signs.look([], 0.0) == "addresses"


def test_sleep_is_a_sign_and_drift_is_none() -> None:
    signs = PathSigns([], 5.0)
    assert signs.look([], 5.2) is None
    assert signs.look([], 65.0) == "slept"
    assert signs.look([], 65.0) is None
