"""An in-memory room with two seats, and two links on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peerllm.link import Link, LinkConfig, LinkState
from peerllm.protocol.errors import PeerAway, RoomClosed

SECONDS = 10.0
"""The longest wait of any test; nothing that passes comes near it."""


class MemoryAttempt:
    """One side of an attempt: bodies go to the other side's queue."""

    def __init__(self, room: MemoryRoom, epoch: int, key: bytes) -> None:
        self.epoch = epoch
        self.session_key = key
        self.sent: list[bytes] = []
        self.other: MemoryAttempt | None = None
        self._room = room
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, body: bytes) -> None:
        self.sent.append(body)
        if self._room.is_reachable and self.other is not None:
            self.other._inbox.put_nowait(self._room.tamper(body))

    async def receive(self) -> bytes:
        return await self._inbox.get()


class MemoryRoom:
    """What `rooms` does for a pair of links. `is_reachable` False loses everything, as a dead server would."""

    def __init__(self) -> None:
        self.is_reachable = True
        self.tamper = lambda body: body
        self.begun: asyncio.Queue[MemoryAttempt | None] = asyncio.Queue()
        self.begun_count = 0
        self.has_begun = asyncio.Event()
        self.suspicions = 0
        self.closed: RoomClosed | None = None
        """Set by `close`: nothing begins any more, and both sides are told at once."""
        self.keys: tuple[bytes, bytes] | None = None
        """Different keys on the two sides, for a peer that is not the one it should be."""

    def close(self, error: RoomClosed) -> None:
        self.closed = error
        self.begun.put_nowait(None)

    def begin(self, epoch: int) -> MemoryAttempt:
        if self.closed is not None:
            raise self.closed
        if not self.is_reachable:
            raise PeerAway("the room is not reachable")
        key = bytes([epoch % 256]) * 32
        mine, theirs = self.keys or (key, key)
        one, two = MemoryAttempt(self, epoch, mine), MemoryAttempt(self, epoch, theirs)
        one.other, two.other = two, one
        self.begun_count += 1
        self.has_begun.set()
        self.begun.put_nowait(two)
        return one


class MemorySeat:
    def __init__(self, room: MemoryRoom, local_id: bytes, remote_id: bytes) -> None:
        self.room = room
        self.local_id = local_id
        self.remote_id = remote_id
        self.is_opener = local_id < remote_id

    async def begin(self, epoch: int) -> MemoryAttempt:
        return self.room.begin(epoch)

    async def accept(self) -> MemoryAttempt:
        if self.room.closed is None and (found := await self.room.begun.get()) is not None:
            return found
        raise self.room.closed or RoomClosed("closed")

    def suspect(self) -> None:
        self.room.suspicions += 1

    async def close(self) -> None: ...


@dataclass
class Side:
    """One link with what it told its daemon."""

    link: Link
    states: list[LinkState] = field(default_factory=list)
    hellos: list[bytes] = field(default_factory=list)

    async def reaches(self, state: LinkState) -> None:
        await self.until(lambda: self.link.state is state)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Asks whenever the link has changed in any way."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                await self.link._changes.next()


class Pair:
    """`left` controls."""

    def __init__(self, *, right: LinkConfig | None = None, **options: Any) -> None:
        self.config = LinkConfig(loopback=True, **options)
        self.right_config = right or self.config
        self.room = MemoryRoom()
        self.left = self.make_side("left")
        self.right = self.make_side("right")

    def make_side(self, name: str) -> Side:
        ids = (b"\1" * 32, b"\2" * 32)
        local, remote = ids if name == "left" else ids[::-1]
        hellos: list[bytes] = []
        link = Link(
            MemorySeat(self.room, local, remote),
            self.config if name == "left" else self.right_config,
            lambda: b"hello of " + name.encode(),
            hellos.append,
        )
        side = Side(link, hellos=hellos)
        link.on_state = side.states.append
        return side

    async def start(self) -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(self.left.link.start(), self.right.link.start())

    async def close(self) -> None:
        await asyncio.gather(self.left.link.close(), self.right.link.close())
