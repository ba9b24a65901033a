"""Rooms and claims, without sockets: a claim takes no seat, and strangers burn nobody's room."""

from __future__ import annotations

from typing import Any

import pytest
from peerllm_signaling import limits

from tests.signaling.board import GREETING, Board, BoardClient


def seated(board: Board, opener: BoardClient, room: int) -> BoardClient:
    """A joiner that the opener seats."""
    joiner = board.client().claim(room)
    claim = [each for each in opener.take() if isinstance(each, dict) and each["op"] == "claim"][-1]
    opener.say("seat", claim=claim["claim"])
    return joiner


def claims_shown(opener: BoardClient) -> list[int]:
    return [each["claim"] for each in opener.line.received if isinstance(each, dict) and each["op"] == "claim"]


def test_what_the_two_say_reaches_the_other_and_nobody_else(board: Board) -> None:
    opener, joiner, stranger = board.client(), board.client(), board.client()
    room = opener.open()
    other = stranger.open()
    joiner.claim(room)
    stranger.take()
    assert opener.take()[-1] == {"op": "claim", "claim": 1, "greeting": GREETING}
    opener.send((1).to_bytes(4) + b"to the joiner")
    joiner.send(b"to the opener")
    assert joiner.take() == [b"to the joiner"]
    assert opener.take() == [(1).to_bytes(4) + b"to the opener"]
    assert stranger.take() == []
    assert other != room


def test_numbers_are_random_among_a_hundred_times_the_open_rooms(board: Board) -> None:
    numbers = [board.client().open() for _ in range(300)]
    assert len(set(numbers)) == 300
    assert all(number >= 1000 for number in numbers)
    assert max(numbers[:80]) < 10_000  # four digits while 9,000 numbers are enough
    assert min(numbers[100:]) >= 10_000  # then five
    assert sorted(numbers) != numbers


def test_a_claim_takes_no_seat(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    for _ in range(limits.MAX_CLAIMS):
        board.client().claim(room)
    board.pass_time(limits.CLAIM_SECONDS + 1)
    joiner = seated(board, opener, room)
    assert {"op": "seated"} in joiner.line.received


def test_a_claim_expires_after_ten_seconds(board: Board) -> None:
    opener, joiner = board.client(), board.client()
    joiner.claim(opener.open())
    board.pass_time(9.5)
    assert joiner.line.dropped is None
    board.pass_time(0.75)
    assert joiner.errors == ["claim_expired"]
    assert {"op": "gone", "claim": 1, "reason": "claim_expired"} in opener.line.received


def test_eight_claims_are_under_way_at_once_and_the_ninth_waits_for_a_place(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    claimers = [board.client().claim(room) for _ in range(limits.MAX_CLAIMS + 1)]
    assert len(claims_shown(opener)) == 8
    claimers[3].leave()
    assert len(claims_shown(opener)) == 9


def test_a_silent_claimer_gives_its_place_to_one_who_waits(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    for _ in range(limits.MAX_CLAIMS):
        board.client().claim(room)
    for claim in claims_shown(opener):
        opener.send(claim.to_bytes(4) + b"answer")
    board.client().claim(room)
    assert len(claims_shown(opener)) == 8
    board.pass_time(limits.CLAIM_SILENT_SECONDS + 0.3)
    assert len(claims_shown(opener)) == 9


def test_a_silent_claimer_keeps_its_place_while_nobody_waits(board: Board) -> None:
    opener, joiner = board.client(), board.client()
    joiner.claim(opener.open())
    opener.send((1).to_bytes(4) + b"answer")
    board.pass_time(5)
    assert joiner.line.dropped is None


def test_places_go_first_to_addresses_that_hold_none(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    crowd = [board.client("attacker").claim(room) for _ in range(limits.MAX_CLAIMS + 5)]
    alone = board.client("alone").claim(room)
    crowd[0].leave()
    alone.send(b"said by the one")  # those without a place may not speak: they would be dropped
    assert alone.line.dropped is None
    assert (9).to_bytes(4) + b"said by the one" in opener.line.received


def test_an_address_that_was_silent_comes_after_all_others(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    for index in range(limits.MAX_CLAIMS):
        board.client(f"silent {index}").claim(room)
    for claim in claims_shown(opener):
        opener.send(claim.to_bytes(4) + b"answer")
    waiting = [board.client(f"silent {index % 8}").claim(room) for index in range(limits.MAX_WAITING_CLAIMS)]
    board.pass_time(limits.CLAIM_SILENT_CROWDED_SECONDS + 0.3)  # now they are known
    waiting += [board.client(f"silent {index}").claim(room) for index in range(8)]
    assert {client.errors[0] for client in waiting if client.errors} == set()
    opener.take()
    honest = board.client("honest").claim(room)  # the line is full: one of the silent makes way
    assert honest.errors == []
    assert [client.errors for client in waiting].count(["room_busy"]) == 1
    for claim in range(9, 17):
        opener.send(claim.to_bytes(4) + b"answer")
    board.pass_time(limits.CLAIM_SILENT_CROWDED_SECONDS + 0.3)
    honest.send(b"spoken")
    assert honest.line.dropped is None  # it has a place, before all who came earlier


def test_the_line_of_those_who_wait_is_bounded(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    for _ in range(limits.MAX_CLAIMS + limits.MAX_WAITING_CLAIMS):
        board.client().claim(room)
    assert board.client().claim(room).errors == ["room_busy"]


def test_a_further_peer_is_told_that_the_room_is_crowded_and_those_inside_go_on(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    late = board.client().claim(room)
    seated(board, opener, room)
    assert late.errors == ["room_crowded"]
    assert board.client().claim(room).errors == ["room_crowded"]
    board.pass_time(limits.ROOM_SECONDS + 1)
    assert opener.line.dropped is None


def test_a_room_with_more_seats_admits_so_many(board: Board) -> None:
    opener = board.client()
    room = opener.open(seats=2)
    for _ in range(2):
        assert {"op": "seated"} in seated(board, opener, room).line.received
    assert board.client().claim(room).errors == ["room_crowded"]


def test_an_unpaired_room_lives_ten_minutes(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    board.pass_time(599)
    assert opener.line.dropped is None
    board.pass_time(2)
    assert opener.take()[-1] == {"op": "closed", "reason": "expired"}
    assert board.client().claim(room).errors == ["room_not_found"]
    assert len(board.switchboard.rooms) == 0


def test_ten_unpaired_rooms_for_an_address_and_paired_ones_do_not_count(board: Board) -> None:
    openers = [board.client("here") for _ in range(10)]
    rooms = [opener.open() for opener in openers]
    extra = board.client("here")
    extra.say("open", token="00" * 16, seats=1)
    assert extra.errors == ["too_many_rooms"]
    seated(board, openers[0], rooms[0])
    board.client("here").open()


def test_a_closed_room_tells_those_at_the_door_why(board: Board) -> None:
    opener, joiner = board.client(), board.client()
    room = opener.open()
    joiner.claim(room)
    opener.say("close", reason="guesses")
    assert joiner.errors == ["room_guesses"]
    assert board.client().claim(room).errors == ["room_not_found"]


def test_an_opener_whose_connection_broke_gets_its_room_back_by_its_token(board: Board) -> None:
    opener = board.client()
    room = opener.open(token="11" * 16)
    opener.leave()
    assert board.client().claim(room).errors == ["opener_away"]
    again = board.client()
    assert again.open(token="11" * 16, room=room) == room
    board.pass_time(limits.ABSENT_SECONDS + 1)
    joiner = seated(board, again, room)
    assert {"op": "seated"} in joiner.line.received


def test_nobody_else_gets_the_room_by_its_number(board: Board) -> None:
    opener, thief = board.client(), board.client()
    room = opener.open(token="11" * 16)
    thief.say("open", token="22" * 16, seats=1, room=room)
    assert thief.errors == ["room_taken"]
    assert opener.line.dropped is None


def test_an_opener_that_comes_back_displaces_its_ghost(board: Board) -> None:
    ghost, again = board.client(), board.client()
    room = ghost.open(token="11" * 16)
    again.open(token="11" * 16, room=room)
    assert ghost.line.dropped is not None
    ghost.say("close", reason="closed")  # too late: the room is not its own any more
    ghost.leave()
    joiner = board.client().claim(room)
    assert joiner.errors == []
    assert claims_shown(again) == [1]


def test_after_a_restart_of_the_server_a_room_comes_back_under_its_number(board: Board) -> None:
    room = board.client().open(token="11" * 16)
    restarted = Board()
    assert restarted.client().open(token="11" * 16, room=room) == room
    assert restarted.client().claim(room).errors == []


def test_a_full_room_comes_back_with_no_seats_and_is_still_crowded(board: Board) -> None:
    opener, again = board.client(), board.client()
    room = opener.open(token="11" * 16)
    opener.leave()  # its word that the seat is taken was lost
    assert again.open(seats=0, token="11" * 16, room=room) == room
    assert board.client().claim(room).errors == ["room_crowded"]
    restarted = Board()
    assert restarted.client().open(seats=0, token="11" * 16, room=room) == room
    assert restarted.client().claim(room).errors == ["room_crowded"]


def test_a_new_room_has_a_seat_at_least(board: Board) -> None:
    opener = board.client()
    opener.say("open", token="11" * 16, seats=0)
    assert opener.errors == ["bad_message"]


def test_a_room_whose_opener_stays_away_is_forgotten(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    opener.leave()
    board.pass_time(limits.ABSENT_SECONDS + 1)
    assert board.client().claim(room).errors == ["room_not_found"]
    assert len(board.switchboard.rooms) == 0


def test_the_sides_of_a_claim_may_say_four_things_each(board: Board) -> None:
    opener, joiner = board.client(), board.client()
    joiner.claim(opener.open())
    for _ in range(4):
        joiner.send(b"x")
    assert joiner.errors == []
    joiner.send(b"x")
    assert joiner.errors == ["too_many"]


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "[]",
        "7",
        "[" * 10_000,
        '{"op": 7}',
        '{"op": "open"}',
        '{"op": "open", "token": "00", "seats": 1}',
        '{"op": "open", "token": "%s", "seats": 1}' % (" " * 32),
        '{"op": "open", "token": "%s", "seats": 0}' % ("00" * 16),
        '{"op": "open", "token": "%s", "seats": true}' % ("00" * 16),
        '{"op": "open", "token": "%s", "seats": 1, "room": "4127"}' % ("00" * 16),
        '{"op": "claim", "room": "4127", "greeting": ""}',
        '{"op": "claim", "room": 4127}',
        '{"op": "claim", "room": 4127, "greeting": "not base64!"}',
        '{"op": "claim", "room": 4127, "greeting": "%s"}' % ("A" * 2000),
        '{"op": "claim", "room": 1%s, "greeting": ""}' % ("0" * 5000),
        '{"op": "meet", "side": 2, "ids": []}',
        '{"op": "meet", "side": 0, "ids": ["00"]}',
        '{"op": "meet", "side": 0, "ids": ["zz"]}',
        '{"op": "meet", "side": 0, "ids": %s}' % (["00" * 32] * 9),
        '{"op": "%s"}' % ("x" * 100),
    ],
)
def test_what_is_no_message_is_answered_and_ends_the_connection(board: Board, message: str) -> None:
    client = board.client()
    client.text(message.replace("'", '"'))
    assert client.errors == ["bad_message"]
    assert client.line.dropped is not None


def test_a_word_of_a_later_release_is_answered_and_ends_nothing(board: Board) -> None:
    client = board.client()
    assert client.say("dance") == [{"op": "error", "code": "unknown_op"}]
    assert client.line.dropped is None
    client.open()


def test_joins_are_limited_for_each_address(board: Board) -> None:
    for _ in range(limits.JOINS_PER_MINUTE):
        assert board.client("one").claim(4127).errors == ["room_not_found"]
    assert board.client("one").claim(4127).errors == ["too_many"]
    assert board.client("other").claim(4127).errors == ["room_not_found"]
    board.pass_time(60)
    assert board.client("one").claim(4127).errors == ["room_not_found"]


def test_a_role_cannot_be_changed(board: Board) -> None:
    opener, other = board.client(), board.client()
    room = opener.open()
    other_room = other.open()
    opener.say("claim", room=other_room, greeting=GREETING)
    assert opener.errors == ["unknown_op"]
    claimer = board.client().claim(room)
    claimer.say("seat", claim=1)
    assert claimer.errors == ["unknown_op"]
    assert {"op": "seated"} not in claimer.line.received


def test_an_opener_cannot_speak_to_claims_that_are_not_its_own(board: Board) -> None:
    one, two, joiner = board.client(), board.client(), board.client()
    one.open()
    joiner.claim(two.open())
    before: list[Any] = list(joiner.line.received)
    one.send((1).to_bytes(4) + b"from a stranger")
    one.say("seat", claim=1)
    one.say("refuse", claim=1)
    assert joiner.line.received == before
