"""Whatever clients do, in whatever order: the switchboard never raises, keeps count, and forgets all in the end."""

from __future__ import annotations

import random

import pytest
from peerllm_signaling import limits

from tests.signaling.board import GREETING, Board, BoardClient


def step(board: Board, chance: random.Random, clients: list[BoardClient], rooms: list[int]) -> None:
    """One thing that some client does, sensible or not."""
    if not clients or chance.random() < 0.2:
        clients.append(board.client(f"10.0.0.{chance.randrange(6)}"))
    client = chance.choice(clients)
    room = chance.choice(rooms) if rooms and chance.random() < 0.9 else chance.randrange(1000, 10_000)
    match chance.randrange(12):
        case 0 | 1:
            again = {"room": room} if chance.random() < 0.3 else {}
            token = f"{chance.randrange(3):02x}" * 16
            answer = client.say("open", token=token, seats=chance.randrange(1, 4), **again)
            rooms += [each["room"] for each in answer if isinstance(each, dict) and each["op"] == "opened"]
        case 2 | 3 | 4:
            client.say("claim", room=room, greeting=GREETING)
        case 5:
            client.say(chance.choice(["seat", "refuse"]), claim=chance.randrange(1, 20))
        case 6:
            client.send(chance.randrange(1, 20).to_bytes(4) + b"body")
        case 7:
            client.meet(chance.randrange(2), *(b"%d" % chance.randrange(5) for _ in range(chance.randrange(1, 4))))
        case 8:
            client.say(chance.choice(["turn", "close", "dance"]), reason=chance.choice(["guesses", "closed", "x", 7]))
        case 9:
            board.pass_time(chance.choice([0.3, 2, 12, 40]))
        case _:
            clients.remove(client)
            client.leave()
    for each in [each for each in clients if each.line.dropped is not None and chance.random() < 0.7]:
        clients.remove(each)
        each.leave()


def check_counts(board: Board) -> None:
    rooms = board.switchboard.rooms
    unpaired = [room for room in rooms._rooms.values() if not room.is_paired]
    assert sum(rooms._by_group.values()) == len(unpaired) == len(rooms._unpaired)
    claims = [claim for room in rooms._rooms.values() for claim in (*room.claims.values(), *room.waiting)]
    assert set(claims) == set(rooms._claims)
    assert not [claim for claim in claims if claim.ended]
    for room in rooms._rooms.values():
        assert len(room.claims) <= limits.MAX_CLAIMS
        assert len(room.waiting) <= limits.MAX_WAITING_CLAIMS
        assert bool(room.waiting) == (room.number in rooms._contended)
        assert (room.line is None) == (room.number in rooms._absent)
    ends = {end for places in board.switchboard.meetings._table.values() for end in places if end is not None}
    assert len(ends) == len(board.switchboard.meetings)
    for end in ends:
        assert end.partner is None or (end.partner.partner is end and end.partner.side != end.side)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_things_keeps_the_counts_and_leaves_nothing(seed: int) -> None:
    chance = random.Random(seed)
    board = Board(turn=lambda: {"urls": []})
    clients: list[BoardClient] = []
    rooms: list[int] = []
    for _ in range(300):
        step(board, chance, clients, rooms)
        check_counts(board)
    for client in clients:
        client.leave()
    board.pass_time(limits.ROOM_SECONDS + 60, step=5)
    held = board.switchboard.rooms
    assert not held._rooms
    assert not (held._unpaired or held._absent or held._claims or held._contended or held._by_group)
    assert not board.switchboard.meetings._table
    assert board.switchboard.remembered() == 0
