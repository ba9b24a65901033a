"""The server without its sockets: messages in, messages out on lines, time as an argument.

A connection is one thing for its life: an opener, a claimer, or an end of a rendezvous. Control messages are JSON text;
what peers say to each other is binary, and opaque here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

from peerllm_signaling import limits
from peerllm_signaling.budgets import Buckets
from peerllm_signaling.line import GOING_AWAY, POLICY, Line, Refused, say
from peerllm_signaling.meetings import End, Meetings
from peerllm_signaling.rooms import Claim, Room, Rooms

_OWN_CLOSING_WORDS = ("closed", "guesses")


class Client:
    """A line and what it is."""

    __slots__ = ("line", "role")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.role: Room | Claim | End | None = None


class Switchboard:
    """`servers` gives what clients are told of STUN, `turn` fresh TURN credentials for a pair, or None."""

    def __init__(
        self,
        draw: Callable[[int, int], int],
        *,
        servers: Callable[[], dict[str, Any]] = dict,
        turn: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self.rooms = Rooms(draw)
        self.meetings = Meetings(self._greet_pair)
        self._servers = servers
        self._turn = turn
        self._joins = Buckets(limits.JOINS_PER_MINUTE, limits.JOINS_PER_MINUTE, limits.MAX_ADDRESSES)
        self._messages = Buckets(limits.MESSAGES_PER_MINUTE, limits.MESSAGES_PER_MINUTE, limits.MAX_ADDRESSES)
        self._meets = Buckets(limits.MEETINGS_PER_MINUTE, limits.MEETINGS_BURST, limits.MAX_ADDRESSES)

    def remembered(self) -> int:
        """How many budgets are kept: a figure for tests and logs."""
        return len(self._joins) + len(self._messages) + len(self._meets)

    def text(self, client: Client, message: str, now: float) -> str:
        """A control message. Returns the event's name for the log."""
        try:
            return self._control(client, message, now)
        except Refused as refused:
            self._answer_error(client, refused)
            return refused.code

    def binary(self, client: Client, body: bytes, now: float) -> None:
        """Something for the other peer."""
        role = client.role
        try:
            if isinstance(role, Claim):
                self._charge(client, role.room.number, now)
                self.rooms.from_claimer(role, body)
            elif isinstance(role, Room):
                if self.rooms.is_held(role, client.line):
                    self.rooms.from_opener(role, body, now)
            elif isinstance(role, End):
                if role.partner is None:
                    self._charge(client, 0, now)
                self.meetings.relay(role, body, now)
            else:
                raise Refused("bad_message")
        except Refused as refused:
            self._answer_error(client, refused)

    def left(self, client: Client, now: float) -> None:
        """The connection is gone, for whatever reason."""
        role, client.role = client.role, None
        if isinstance(role, Claim):
            self.rooms.claimer_left(role)
        elif isinstance(role, Room):
            self.rooms.opener_left(role, client.line, now)
        elif isinstance(role, End):
            self.meetings.leave(role)

    def tick(self, now: float) -> None:
        self.rooms.tick(now)
        for buckets in (self._joins, self._messages, self._meets):
            buckets.forget_full(now)

    # --- Control messages -----------------------------------------------------------------------------------

    def _control(self, client: Client, message: str, now: float) -> str:
        try:
            value = json.loads(message)
        except (ValueError, RecursionError):
            raise Refused("bad_message") from None
        op = value.get("op") if isinstance(value, dict) else None
        role = client.role
        if isinstance(role, Room) and not self.rooms.is_held(role, client.line):
            return "late"  # said before the news that the room is gone arrived
        if op == "open" and role is None:
            self._open(client, value, now)
        elif op == "claim" and role is None:
            self._claim(client, value, now)
        elif op == "meet" and (role is None or isinstance(role, End)):
            self._meet(client, value, now)
        elif op in ("seat", "refuse") and isinstance(role, Room):
            number = _whole(value, "claim", 1, 1 << 32)
            (self.rooms.seat if op == "seat" else self.rooms.refuse)(role, number)
        elif op == "close" and isinstance(role, Room):
            reason = value.get("reason")
            self.rooms.close(role, f"room_{reason}" if reason in _OWN_CLOSING_WORDS else "room_closed")
            client.role = None
            client.line.drop(GOING_AWAY, "closed")
        elif op == "turn" and isinstance(role, End) and role.partner is not None:
            if role.budget is not None and not role.budget.take(now):
                raise Refused("too_many")
            say(client.line, "turn", turn=self._turn())
        elif isinstance(op, str) and op.isascii() and len(op) <= 32:
            # A later release's word: answered, and nothing ends.
            self._charge(client, 0, now)
            raise Refused("unknown_op", ends=False)
        else:
            raise Refused("bad_message")
        return str(op)

    def _open(self, client: Client, value: dict[str, Any], now: float) -> None:
        if not self._joins.take(client.line.group, now):
            raise Refused("too_many")
        token = _hex(value.get("token"), 16)
        number = None if value.get("room") is None else _whole(value, "room", 1000, 10**12)
        # A full room comes back too: so that whoever else has its code is still told that it is crowded.
        seats = _whole(value, "seats", 1 if number is None else 0, limits.MAX_SEATS)
        room = self.rooms.open(client.line, token, seats, number, now)
        client.role = room
        say(client.line, "opened", room=room.number, seconds=round(room.deadline - now), **self._servers())

    def _claim(self, client: Client, value: dict[str, Any], now: float) -> None:
        if not self._joins.take(client.line.group, now):
            raise Refused("too_many")
        greeting = value.get("greeting")
        if not isinstance(greeting, str) or len(greeting) > 2 * limits.MAX_GREETING_BYTES or not _is_base64(greeting):
            raise Refused("bad_message")
        number = _whole(value, "room", 0, 10**12)
        client.role = self.rooms.claim(client.line, number, greeting, now)

    def _meet(self, client: Client, value: dict[str, Any], now: float) -> None:
        if not self._meets.take(client.line.group, now):
            raise Refused("too_many")
        side = _whole(value, "side", 0, 1)
        ids = value.get("ids")
        if not isinstance(ids, list) or not 1 <= len(ids) <= limits.MAX_MEETING_IDS:
            raise Refused("bad_message")
        wanted = tuple(dict.fromkeys(_hex(each, limits.MEETING_ID_BYTES) for each in ids))
        old = client.role if isinstance(client.role, End) else None
        say(client.line, "meeting", **self._servers())
        client.role = self.meetings.meet(client.line, old, side, wanted, now)

    def _greet_pair(self, end: End) -> None:
        turn = self._turn()
        say(end.line, "present", **({} if turn is None else {"turn": turn}))

    # --- Errors ---------------------------------------------------------------------------------------------

    def _charge(self, client: Client, room: int, now: float) -> None:
        if not self._messages.take((client.line.group, room), now):
            raise Refused("too_many")

    def _answer_error(self, client: Client, refused: Refused) -> None:
        say(client.line, "error", code=refused.code)
        if refused.ends:
            client.line.drop(POLICY, refused.code)


def _whole(value: dict[str, Any], name: str, low: int, high: int) -> int:
    number = value.get(name)
    if type(number) is not int or not low <= number <= high:
        raise Refused("bad_message")
    return number


def _hex(value: Any, length: int) -> bytes:
    if not isinstance(value, str) or len(value) != 2 * length:
        raise Refused("bad_message")
    try:
        found = bytes.fromhex(value)
    except ValueError:
        raise Refused("bad_message") from None
    if len(found) != length:  # fromhex skips spaces
        raise Refused("bad_message")
    return found


def _is_base64(value: str) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) <= limits.MAX_GREETING_BYTES
    except (binascii.Error, ValueError):
        return False
