"""Rooms and the claims on them: a state machine without I/O or clock.

A room belongs to the line that opened it. A claim takes no seat: the opener is told of it, both exchange a few opaque
messages, and only the opener can turn a claim into a seat. So strangers who guess numbers burn nobody's room.
"""

from __future__ import annotations

import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from peerllm_signaling import limits
from peerllm_signaling.line import GOING_AWAY, POLICY, Line, Refused, say


@dataclass(slots=True, eq=False)
class Claim:
    """One peer that tries to enter. `number` is 0 while it waits for one of the room's places."""

    line: Line
    room: Room
    greeting: str
    deadline: float
    number: int = 0
    from_opener: int = 0
    from_claimer: int = 0
    silent_since: float | None = None
    """Since when it has been the claimer's turn to speak."""
    ended: bool = False


@dataclass(slots=True, eq=False)
class Room:
    number: int
    token: bytes
    line: Line | None
    group: str
    seats: int
    deadline: float
    is_paired: bool = False
    next_claim: int = 1
    claims: dict[int, Claim] = field(default_factory=dict)
    waiting: deque[Claim] = field(default_factory=deque)
    silent_groups: set[str] = field(default_factory=set)
    """Addresses that held a place here and said nothing: they come after all others."""


class Rooms:
    """All rooms. `draw(low, high)` gives a random whole number in [low, high)."""

    def __init__(self, draw: Callable[[int, int], int]) -> None:
        self._draw = draw
        self._rooms: dict[int, Room] = {}
        self._unpaired: OrderedDict[int, Room] = OrderedDict()  # every life is as long: oldest first is next to end
        self._absent: OrderedDict[int, tuple[float, Room]] = OrderedDict()
        self._claims: OrderedDict[Claim, None] = OrderedDict()
        self._contended: OrderedDict[int, Room] = OrderedDict()
        self._by_group: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rooms)

    # --- The opener -----------------------------------------------------------------------------------------

    def open(self, line: Line, token: bytes, seats: int, number: int | None, now: float) -> Room:
        """A new room, or the opener's old one (`number`, with the same token) after its connection or the server broke;
        that may have no free seat left. After a restart of the server it is one that nobody has joined yet.

        Raises:
            Refused: server full, too many unpaired rooms of this address, or the old number is someone else's.
        """
        if number is not None and (room := self._rooms.get(number)) is not None:
            if not hmac.compare_digest(room.token, token):
                raise Refused("room_taken")
            self._take_over(room, line)
            room.seats = min(room.seats, seats)  # its word that one was taken may have been lost with the connection
            return room
        if len(self._rooms) >= limits.MAX_ROOMS:
            raise Refused("server_full")
        if self._by_group[line.group] >= limits.MAX_UNPAIRED_ROOMS_PER_ADDRESS:
            raise Refused("too_many_rooms")
        room = Room(number or self._free_number(), token, line, line.group, seats, now + limits.ROOM_SECONDS)
        self._rooms[room.number] = self._unpaired[room.number] = room
        self._by_group[room.group] += 1
        return room

    def _free_number(self) -> int:
        wanted = limits.NUMBERS_PER_ROOM * (len(self._rooms) + 1)
        low = 10 ** (limits.MIN_ROOM_DIGITS - 1)
        while 9 * low < wanted:
            low *= 10
        while True:  # at most one number in a hundred is taken
            number = self._draw(low, 10 * low)
            if number not in self._rooms:
                return number

    def _take_over(self, room: Room, line: Line) -> None:
        old, room.line = room.line, line
        self._absent.pop(room.number, None)
        for claim in _all_claims(room):
            self._end(claim, "opener_returned", tell_opener=False)
        if old is not None and old is not line:
            old.drop(POLICY, "opened again elsewhere")

    def is_held(self, room: Room, line: Line) -> bool:
        """Whether the room is still open and this line is its opener's."""
        return room.line is line and self._rooms.get(room.number) is room

    def seat(self, room: Room, number: int) -> None:
        """The opener's word that this claimer confirmed the key."""
        claim = room.claims.get(number)
        if claim is None or room.seats == 0:
            return
        room.seats -= 1
        if not room.is_paired:
            room.is_paired = True
            self._forget_unpaired(room)
        say(claim.line, "seated")
        self._end(claim, None, tell_opener=False)
        if room.seats == 0:
            for other in _all_claims(room):
                self._end(other, "room_crowded")

    def refuse(self, room: Room, number: int) -> None:
        """The opener is done with a claim that did not confirm the key."""
        claim = room.claims.get(number)
        if claim is not None:
            self._end(claim, "refused", tell_opener=False)

    def close(self, room: Room, reason: str) -> None:
        for claim in _all_claims(room):
            self._end(claim, reason, tell_opener=False)
        del self._rooms[room.number]
        self._absent.pop(room.number, None)
        self._contended.pop(room.number, None)
        if not room.is_paired:
            self._forget_unpaired(room)

    def _forget_unpaired(self, room: Room) -> None:
        self._unpaired.pop(room.number, None)
        self._by_group[room.group] -= 1
        if not self._by_group[room.group]:
            del self._by_group[room.group]

    def opener_left(self, room: Room, line: Line, now: float) -> None:
        """Its connection ended without a word; it may come back."""
        if room.line is line:
            room.line = None
            for claim in _all_claims(room):
                self._end(claim, "opener_away", tell_opener=False)
            self._absent[room.number] = (now + limits.ABSENT_SECONDS, room)

    # --- Claims ---------------------------------------------------------------------------------------------

    def claim(self, line: Line, number: int, greeting: str, now: float) -> Claim:
        """Raises Refused: no such room, it is full, or too many wait for it."""
        room = self._rooms.get(number)
        if room is None:
            raise Refused("room_not_found")
        if room.seats == 0:
            raise Refused("room_crowded")
        if room.line is None:
            raise Refused("opener_away")
        claim = Claim(line, room, greeting, now + limits.CLAIM_SECONDS)
        if len(room.claims) < limits.MAX_CLAIMS:
            self._activate(claim)
        else:
            if len(room.waiting) >= limits.MAX_WAITING_CLAIMS:
                self._make_way(room, line.group)
            room.waiting.append(claim)
            self._contended[room.number] = room
        self._claims[claim] = None
        return claim

    def _make_way(self, room: Room, group: str) -> None:
        """For an address that was not silent here yet, one that was leaves the line."""
        if group not in room.silent_groups:
            for other in reversed(room.waiting):
                if other.line.group in room.silent_groups:
                    self._end(other, "room_busy")
                    return
        raise Refused("room_busy")

    def _activate(self, claim: Claim) -> None:
        room = claim.room
        claim.number, room.next_claim = room.next_claim, room.next_claim + 1
        room.claims[claim.number] = claim
        if room.line is not None:
            say(room.line, "claim", claim=claim.number, greeting=claim.greeting)
        claim.greeting = ""

    def from_claimer(self, claim: Claim, body: bytes) -> None:
        if claim.ended:
            return
        claim.from_claimer += 1
        if claim.number == 0 or claim.from_claimer > limits.MAX_CLAIM_MESSAGES:
            raise Refused("too_many")
        claim.silent_since = None
        if claim.room.line is not None:
            claim.room.line.send(claim.number.to_bytes(4, "big") + body)

    def from_opener(self, room: Room, frame: bytes, now: float) -> None:
        claim = room.claims.get(int.from_bytes(frame[:4], "big"))
        if claim is None:  # it ended while this was on its way
            return
        claim.from_opener += 1
        if claim.from_opener > limits.MAX_CLAIM_MESSAGES:
            raise Refused("too_many")
        claim.silent_since = now
        claim.line.send(frame[4:])

    def claimer_left(self, claim: Claim) -> None:
        self._end(claim, None, tell_opener=True)

    def _end(self, claim: Claim, reason: str | None, *, tell_opener: bool = True) -> None:
        """`reason` goes to the claimer, if it is still there."""
        if claim.ended:
            return
        claim.ended = True
        room = claim.room
        self._claims.pop(claim, None)
        if claim.number:
            del room.claims[claim.number]
            if tell_opener and room.line is not None:
                say(room.line, "gone", claim=claim.number, reason=reason or "left")
        else:
            room.waiting.remove(claim)
        if not room.waiting:
            self._contended.pop(room.number, None)
        if reason is not None:
            say(claim.line, "error", code=reason)
            claim.line.drop(GOING_AWAY, reason)
        if claim.number:
            self._fill(room)

    def _fill(self, room: Room) -> None:
        """Gives free places to those who wait: first to addresses that were not silent, and that hold the fewest."""
        while room.waiting and room.seats and room.line is not None and len(room.claims) < limits.MAX_CLAIMS:
            held = Counter(claim.line.group for claim in room.claims.values())
            # min keeps the order of arrival among equals
            claim = min(room.waiting, key=lambda each: (each.line.group in room.silent_groups, held[each.line.group]))
            room.waiting.remove(claim)
            self._activate(claim)
        if not room.waiting:
            self._contended.pop(room.number, None)

    # --- Time -----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends what has lived too long. To be called a few times a second."""
        while self._claims and (claim := next(iter(self._claims))).deadline <= now:
            self._end(claim, "claim_expired")
        for room in list(self._contended.values()):
            self._end_silent(room, now)
        while self._unpaired and (room := next(iter(self._unpaired.values()))).deadline <= now:
            self._expire(room)
        while self._absent:
            deadline, room = next(iter(self._absent.values()))
            if deadline > now:
                break
            self.close(room, "room_closed")

    def _end_silent(self, room: Room, now: float) -> None:
        is_full = len(room.waiting) >= limits.MAX_WAITING_CLAIMS
        patience = limits.CLAIM_SILENT_CROWDED_SECONDS if is_full else limits.CLAIM_SILENT_SECONDS
        for claim in list(room.claims.values()):
            group, since = claim.line.group, claim.silent_since
            if not room.waiting or since is None:
                continue
            if now - since >= (0.0 if group in room.silent_groups else patience):
                if len(room.silent_groups) < limits.MAX_SILENT_GROUPS:
                    room.silent_groups.add(group)
                self._end(claim, "claim_expired")

    def _expire(self, room: Room) -> None:
        line = room.line
        self.close(room, "room_closed")
        if line is not None:
            say(line, "closed", reason="expired")
            line.drop(GOING_AWAY, "expired")


def _all_claims(room: Room) -> list[Claim]:
    # Those who wait first: else each that ends would hand its place to one of them.
    return [*room.waiting, *room.claims.values()]
