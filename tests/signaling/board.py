"""A switchboard with a clock of the test's own, and clients whose lines record."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from peerllm_signaling import limits
from peerllm_signaling.switchboard import Client, Switchboard

GREETING = base64.b64encode(b"greeting").decode()


class RecordingLine:
    """What a client would have received."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.received: list[dict[str, Any] | bytes] = []
        self.dropped: tuple[int, str] | None = None

    def send(self, data: str | bytes) -> None:
        if self.dropped is None:
            self.received.append(json.loads(data) if isinstance(data, str) else data)

    def drop(self, code: int, reason: str) -> None:
        self.dropped = self.dropped or (code, reason)


class Board:
    """A switchboard, its clock, and clients that speak to it."""

    def __init__(self, turn: Callable[[], dict[str, Any] | None] = lambda: None) -> None:
        chance = random.Random(7)
        self.now = 1000.0
        self.switchboard = Switchboard(lambda low, high: chance.randrange(low, high), turn=turn)
        self._addresses = itertools.count()

    def client(self, group: str | None = None) -> BoardClient:
        return BoardClient(self, group or f"10.{next(self._addresses)}")

    def pass_time(self, seconds: float, step: float = 0.25) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.switchboard.tick(self.now)


class BoardClient:
    def __init__(self, board: Board, group: str) -> None:
        self.board = board
        self.line = RecordingLine(group)
        self.client = Client(self.line)

    def say(self, op: str, **fields: Any) -> list[dict[str, Any] | bytes]:
        """Gives what came in answer."""
        return self.text(json.dumps({"op": op, **fields}))

    def text(self, message: str) -> list[dict[str, Any] | bytes]:
        before = len(self.line.received)
        self.board.switchboard.text(self.client, message, self.board.now)
        return self.line.received[before:]

    def send(self, body: bytes) -> None:
        self.board.switchboard.binary(self.client, body, self.board.now)

    def leave(self) -> None:
        self.board.switchboard.left(self.client, self.board.now)

    def take(self) -> list[dict[str, Any] | bytes]:
        """What was received since the last take."""
        taken, self.line.received = self.line.received, []
        return taken

    @property
    def errors(self) -> list[str]:
        return [each["code"] for each in self.line.received if isinstance(each, dict) and each["op"] == "error"]

    def open(self, seats: int = 1, token: str = "00" * 16, **fields: Any) -> int:
        answer = self.say("open", token=token, seats=seats, **fields)
        assert isinstance(answer[0], dict)
        assert answer[0]["op"] == "opened", answer
        number: int = answer[0]["room"]
        return number

    def claim(self, room: int) -> BoardClient:
        self.say("claim", room=room, greeting=GREETING)
        return self

    def meet(self, side: int, *ids: bytes) -> BoardClient:
        self.say("meet", side=side, ids=[each.ljust(limits.MEETING_ID_BYTES, b".").hex() for each in ids])
        return self
