"""Rendezvous, without sockets: two who know each other meet, and a newer connection displaces an older."""

from __future__ import annotations

from peerllm_signaling import limits

from tests.signaling.board import Board, BoardClient


def pair(board: Board) -> tuple[BoardClient, BoardClient]:
    one, two = board.client().meet(0, b"today"), board.client().meet(1, b"today")
    one.take(), two.take()
    return one, two


def test_two_at_the_same_place_hear_of_each_other_and_speak(board: Board) -> None:
    one = board.client().meet(0, b"today")
    assert one.take() == [{"op": "meeting"}]
    two = board.client().meet(1, b"today")
    assert one.take() == [{"op": "present"}]
    assert two.take() == [{"op": "meeting"}, {"op": "present"}]
    one.send(b"hello")
    two.send(b"well met")
    assert (one.take(), two.take()) == ([b"well met"], [b"hello"])


def test_one_day_in_common_is_enough(board: Board) -> None:
    board.client().meet(0, b"day 1", b"day 2", b"day 3")
    assert {"op": "present"} in board.client().meet(1, b"day 3", b"day 4", b"day 5").take()


def test_strangers_do_not_meet(board: Board) -> None:
    board.client().meet(0, b"here")
    assert board.client().meet(1, b"there").take() == [{"op": "meeting"}]


def test_what_is_said_while_the_other_is_away_is_answered_so(board: Board) -> None:
    one = board.client().meet(0, b"today")
    one.take()
    one.send(b"hello?")
    assert one.take() == [{"op": "away"}]


def test_who_leaves_is_missed(board: Board) -> None:
    one, two = pair(board)
    two.leave()
    assert one.take() == [{"op": "away"}]


def test_a_newer_connection_of_the_same_side_evicts_its_ghost(board: Board) -> None:
    one, ghost = pair(board)
    back = board.client().meet(1, b"today")
    assert ghost.take() == [{"op": "evicted"}]
    assert ghost.line.dropped is not None
    assert one.take() == [{"op": "away"}, {"op": "present"}]
    ghost.leave()
    one.send(b"are you there?")
    assert back.take()[-1] == b"are you there?"


def test_a_ghost_is_evicted_while_the_other_peer_is_away(board: Board) -> None:
    ghost = board.client().meet(0, b"today")
    back = board.client().meet(0, b"today")
    assert {"op": "evicted"} in ghost.take()
    ghost.leave()
    other = board.client().meet(1, b"today")
    other.send(b"hello")
    assert back.take()[-1] == b"hello"


def test_a_ghost_cannot_speak_any_more(board: Board) -> None:
    one, ghost = pair(board)
    board.client().meet(1, b"today")
    one.take()
    ghost.send(b"late")
    assert one.take() == []


def test_a_new_day_moves_the_pair_on_without_a_new_connection(board: Board) -> None:
    one, two = pair(board)
    one.meet(0, b"today", b"tomorrow")
    two.meet(1, b"today", b"tomorrow")
    one.take(), two.take()
    one.meet(0, b"tomorrow")
    two.meet(1, b"tomorrow")
    one.send(b"good morning")
    assert two.take()[-1] == b"good morning"
    assert len(board.switchboard.meetings) == 2


def test_nothing_is_kept_of_those_who_left(board: Board) -> None:
    one, two = pair(board)
    one.leave(), two.leave()
    assert len(board.switchboard.meetings) == 0
    assert not board.switchboard.meetings._table


def test_one_that_waits_alone_may_say_64_things_a_minute(board: Board) -> None:
    one = board.client().meet(0, b"today")
    for _ in range(limits.MESSAGES_PER_MINUTE):
        one.send(b"hello?")
    assert one.errors == []
    one.send(b"hello?")
    assert one.errors == ["too_many"]


def test_a_pair_may_say_300_things_at_once_and_600_a_minute(board: Board) -> None:
    one, two = pair(board)
    for _ in range(150):
        one.send(b"a"), two.send(b"b")
    assert (one.errors, two.errors) == ([], [])
    board.pass_time(30)
    for _ in range(300):
        one.send(b"a")
    assert one.errors == []
    one.send(b"a")
    assert one.errors == ["too_many"]


def test_a_fresh_connection_does_not_refill_the_pairs_budget(board: Board) -> None:
    one, _ = pair(board)
    for _ in range(300):
        one.send(b"a")
    board.client().meet(1, b"today")
    one.take()
    one.send(b"a")
    assert one.errors == ["too_many"]


def test_turn_credentials_are_for_pairs_alone() -> None:
    board = Board(turn=lambda: {"urls": ["turn:127.0.0.1"]})
    one = board.client().meet(0, b"today")
    assert one.say("turn") == [{"op": "error", "code": "unknown_op"}]
    board.client().meet(1, b"today")
    assert one.take()[-1] == {"op": "present", "turn": {"urls": ["turn:127.0.0.1"]}}
    assert one.say("turn") == [{"op": "turn", "turn": {"urls": ["turn:127.0.0.1"]}}]
