"""A peer that was authenticated once: it is met again at the rendezvous, and each attempt has fresh keys."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import (
    PeerAway,
    PeerllmError,
    ProtocolError,
    RoomClosed,
    SignalingUnreachable,
    VersionMismatch,
)
from peerllm.protocol.fields import from_map, to_map
from peerllm.rooms import attempt as attempts
from peerllm.rooms import keys, server, wire
from peerllm.rooms.attempt import Attempt, Beginning
from peerllm.rooms.servers import IceServers
from peerllm.rooms.wire import Introduction, Versions

_NEW_DAY_CHECK_SECONDS = 3600.0


@dataclass(slots=True)
class _Pending:
    beginning: Beginning
    done: asyncio.Future[Attempt]


@dataclass(slots=True, kw_only=True, eq=False)
class SeatedPeer:
    """Satisfies `link.signaling.SeatedPeer`. `await start()` begins to keep a connection to the signaling server."""

    identity: X25519PrivateKey
    remote_id: bytes
    is_opener: bool
    signaling_url: str
    insecure: bool = False
    room_name: str = ""
    versions: Versions = wire.VERSIONS
    introductions: list[Introduction] = field(default_factory=list)
    on_introduction: Callable[[Introduction], None] | None = None
    clock: Callable[[], float] = time.time
    local_id: bytes = b""
    ice_servers: IceServers = field(default_factory=IceServers)
    """What the signaling server offers; filled when it is reached."""

    _remote: X25519PublicKey = field(init=False)
    _socket: server.ServerSocket | None = None
    _presence: int = 0
    """Counts the arrivals of the other peer; odd and even mean nothing."""
    _is_present: bool = False
    _runner: asyncio.Task[None] | None = None
    _failure: PeerllmError | None = None
    _trouble: SignalingUnreachable | None = None
    _suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: dict[bytes, _Pending] = field(default_factory=dict)
    _live: dict[bytes, Attempt] = field(default_factory=dict)
    _unproven: dict[bytes, Attempt] = field(default_factory=dict)
    _accepted: Attempt | None = None
    _complaint: ProtocolError | None = None
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _absence: asyncio.TimerHandle | None = None
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.local_id = self.identity.public_key().public_bytes_raw()
        self._remote = X25519PublicKey.from_public_bytes(self.remote_id)

    @property
    def is_controlling(self) -> bool:
        """The smaller key begins attempts; the other accepts them."""
        return self.local_id < self.remote_id

    # --- What the link calls ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name=f"signaling of {self.room_name}")

    async def begin(self, epoch: int) -> Attempt:
        """A new attempt, with fresh keys. Safe to cancel.

        Raises:
            PeerAway: the other peer is not there or does not answer within ATTEMPT_SECONDS.
            SignalingUnreachable, RoomClosed: the server, or this peer's place, is gone.
            VersionMismatch: releases without a version in common.
            ProtocolError: someone answers for the other peer.
        """
        self._check()
        if self._socket is not None and time.monotonic() - self._socket.heard_at > limits.SIGNALING_PROBE_SECONDS:
            self.suspect()
        was_present = False
        try:
            async with asyncio.timeout(limits.ATTEMPT_SECONDS):
                while True:
                    while not self._can_talk:
                        await self._next()
                    was_present = True
                    found = await self._shake_hands(epoch)
                    if found is not None:
                        return found
        except TimeoutError:
            raise self._why_nobody(was_present) from None

    async def accept(self) -> Attempt:
        """The newest attempt that the other peer began and proved. Safe to cancel.

        Raises:
            ProtocolError: someone else tries to connect in its place. Call again to go on waiting.
            RoomClosed: this peer's place is gone.
        """
        while True:
            self._check()
            found, self._accepted = self._accepted, None
            if found is not None and found.failure is None:
                return found
            complaint, self._complaint = self._complaint, None
            if complaint is not None:
                raise complaint
            await self._next()

    def suspect(self) -> None:
        """To be called when the link is suspect: the connection to the signaling server is probed at once, and replaced
        by a fresh one unless it answers within SIGNALING_PROBE_SECONDS. The fresh one evicts the old."""
        self._suspicion.set()

    async def offered(self, seconds: float) -> IceServers:
        """What the signaling server offers for the link, or nothing if it is not reached in time. Relays are offered
        once the other peer is there; this waits for that too, in the same time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._can_talk:
                    self._check()
                    await self._next()
        return self.ice_servers

    async def renew_turn(self) -> None:
        """Asks for fresh TURN credentials; `ice_servers` has them as soon as they come. Without an answer if the server
        offers none."""
        if self._can_talk and self._socket is not None:
            with contextlib.suppress(SignalingUnreachable):
                await self._socket.say("turn")

    async def introduce(self, found: Attempt, introduction: Introduction) -> None:
        """Tells the peer of a further one, sealed in an attempt."""
        await found.send_sealed(wire.INTRODUCTION, cbor.encode(to_map(introduction)))

    async def close(self) -> None:
        self._end(RoomClosed("This peer left the room."))
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # --- The handshake ------------------------------------------------------------------------------------------------

    async def _shake_hands(self, epoch: int) -> Attempt | None:
        """None when the other peer's connection was replaced meanwhile: it never saw the beginning."""
        presence = self._presence
        beginning = Beginning(self.identity, self._remote, epoch, self.versions)
        pending = _Pending(beginning, asyncio.get_running_loop().create_future())
        self._pending[beginning.tag] = pending
        try:
            try:
                await self._post(beginning.frame)
            except PeerAway:
                await self._next()  # the socket is dead, and its reader has not noticed yet
                return None
            while not pending.done.done():
                if not self._can_talk or presence != self._presence:
                    return None
                self._check()
                await self._next()
            made = pending.done.result()
        finally:
            del self._pending[beginning.tag]
            if pending.done.done() and not pending.done.cancelled():
                pending.done.exception()  # taken note of
            else:
                pending.done.cancel()
        await made.send_sealed(wire.START)
        return made

    @property
    def _can_talk(self) -> bool:
        return self._is_present and self._socket is not None

    def _why_nobody(self, was_present: bool) -> PeerllmError:
        if self._complaint is not None:
            return self._complaint
        if self._socket is None and self._trouble is not None:
            return self._trouble
        if was_present:
            return PeerAway("The other peer does not answer through the signaling server.")
        return PeerAway("The other peer is not at the signaling server. Is peerllm running there?")

    def _take(self, data: bytes) -> list[bytes]:
        """A frame from the other peer, or from whoever stands between. Gives frames to answer with."""
        kind = data[0] if data else 0
        if kind == wire.BEGIN:
            if self.is_controlling:
                raise ProtocolError(f"Our own message came back. {attempts.TAMPERED}")
            return self._take_begin(data)
        if kind == wire.ANSWER:
            tag, version, message = wire.split(data, wire.ANSWER, wire.ATTEMPT_BYTES, 2)
            pending = self._pending.get(tag)
            if not self.is_controlling:
                raise ProtocolError(f"Our own message came back. {attempts.TAMPERED}")
            if pending is not None and not pending.done.done():
                self._take_answer(pending, version, message)
        elif kind == wire.SEALED:
            self._take_sealed(data)
        elif kind == wire.UNEQUAL:
            tag, spoken = wire.split(data, wire.UNEQUAL, wire.ATTEMPT_BYTES)
            pending = self._pending.get(tag)
            if pending is not None and not pending.done.done() and len(spoken) >= 4:
                pending.done.set_exception(pending.beginning.take_unequal(wire.unpack_range(spoken[:4])))
        return []

    def _take_begin(self, data: bytes) -> list[bytes]:
        try:
            tag, frame, epoch, made = attempts.answer(self.identity, self._remote, data, self.versions)
        except VersionMismatch:
            return [attempts.unequal(data, self.versions)]
        _keep_newest(self._unproven, tag, Attempt(tag, epoch, made, self._post))
        return [frame]

    def _take_answer(self, pending: _Pending, version: bytes, message: bytes) -> None:
        try:
            made = pending.beginning.take_answer(version, message)
        except PeerllmError as error:
            pending.done.set_exception(error)
            return
        found = Attempt(pending.beginning.tag, pending.beginning.epoch, made, self._post)
        _keep_newest(self._live, found.tag, found)
        pending.done.set_result(found)

    def _take_sealed(self, data: bytes) -> None:
        tag, counter, sealed = wire.unpack_sealed(data)
        found = self._live.get(tag) or self._unproven.get(tag)
        if found is None:
            return  # of an attempt that is over: late, or replayed; there is no key left that could open it
        other = found.take(counter, data[: len(data) - len(sealed)], sealed)
        if other is None:
            return
        what, content = other
        if what == wire.START and tag in self._unproven:
            _keep_newest(self._live, tag, self._unproven.pop(tag))
            self._accepted = found
        elif what == wire.INTRODUCTION:
            self._take_introduction(content)

    def _take_introduction(self, content: bytes) -> None:
        introduction = from_map(Introduction, cbor.decode(content, max_bytes=limits.MAX_SIGNALING_BYTES))
        if len(self.introductions) < limits.MAX_INTRODUCTIONS and introduction not in self.introductions:
            self.introductions.append(introduction)
            if self.on_introduction is not None:
                self.on_introduction(introduction)

    async def _post(self, frame: bytes) -> None:
        self._check()
        if self._socket is None or not self._can_talk:
            raise PeerAway("The other peer is not at the signaling server.")
        try:
            await self._socket.send(frame)
        except SignalingUnreachable as error:
            raise PeerAway("The connection to the signaling server was lost.") from error

    # --- The connection to the server ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        try:
            while self._failure is None:
                try:
                    socket = await server.connect(
                        self.signaling_url,
                        insecure=self.insecure,
                        seconds=_nth(limits.SIGNALING_RECONNECT_SECONDS, failures),
                    )
                except SignalingUnreachable as error:
                    self._trouble = error
                else:
                    failures = 0 if await self._attend(socket) else failures
                if self._failure is None:
                    pause = _nth(limits.SIGNALING_RETRY_SECONDS, failures) * random.uniform(0.5, 1)
                    failures += 1
                    await asyncio.sleep(pause)
        except PeerllmError as error:
            self._end(error)

    async def _attend(self, socket: server.ServerSocket) -> bool:
        """For the life of one socket. Whether it was ever of use."""
        was_useful = False
        tasks = [asyncio.create_task(self._probe(socket)), asyncio.create_task(self._follow_days(socket))]
        reader = asyncio.create_task(self._read(socket))
        try:
            await self._meet(socket)
            await asyncio.wait([reader, tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            was_useful = self._socket is socket
            if reader.done():
                reader.result()
        except SignalingUnreachable as error:
            self._trouble = error
        finally:
            self._socket = None
            self._left()
            for task in [*tasks, reader]:
                task.cancel()
            await asyncio.gather(*tasks, reader, return_exceptions=True)
            # A half-open socket takes a second to close: the next is not kept waiting for that.
            closing = asyncio.create_task(socket.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return was_useful

    async def _meet(self, socket: server.ServerSocket) -> None:
        ids = keys.meeting_ids(self.identity, self.remote_id, self.clock())
        await socket.say("meet", side=0 if self.is_controlling else 1, ids=[each.hex() for each in ids])

    async def _follow_days(self, socket: server.ServerSocket) -> None:
        """A new day has a new rendezvous."""
        while True:
            day = self.clock() // 86400
            await asyncio.sleep(min(_NEW_DAY_CHECK_SECONDS, keys.seconds_to_next_day(self.clock()) + 1))
            if self.clock() // 86400 != day:
                await self._meet(socket)

    async def _probe(self, socket: server.ServerSocket) -> None:
        """Ends when the socket is found to be half open."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            if not await socket.is_alive(limits.SIGNALING_PROBE_SECONDS):
                return

    async def _read(self, socket: server.ServerSocket) -> None:
        while True:
            message = await socket.receive()
            if isinstance(message, dict):
                self._control(socket, message)
                continue
            try:
                answers = self._take(message)
            except ProtocolError as error:
                self._complaint = attempts.blaming(error)
                answers = []
            self._wake()
            for frame in answers:
                await socket.send(frame)

    def _control(self, socket: server.ServerSocket, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "meeting":
            self._socket = socket
            self._trouble = None
            self.ice_servers = self.ice_servers.with_stun(self.signaling_url, message)
        elif op == "present" and self._socket is socket:
            self.ice_servers = self.ice_servers.with_turn(message, time.monotonic())
            self._presence += 1
            self._is_present = True
            if self._absence is not None:
                self._absence.cancel()
                self._absence = None
        elif op == "turn":
            self.ice_servers = self.ice_servers.with_turn(message, time.monotonic())
        elif op == "away":
            self._left()
        elif op == "evicted":
            self._end(
                RoomClosed("Another daemon with this peer's key came to the rendezvous and took this one's place.")
            )
        elif op == "error":
            raise SignalingUnreachable(server.error_of(message.get("code")).message)
        self._wake()

    def _left(self) -> None:
        self._is_present = False
        if self._absence is None and (self._live or self._unproven):
            self._absence = asyncio.get_running_loop().call_later(limits.ABSENCE_SECONDS, self._give_up_attempts)
        self._wake()

    def _give_up_attempts(self) -> None:
        self._absence = None
        self._drop_attempts(PeerAway("The other peer left the signaling server."))

    def _drop_attempts(self, error: PeerllmError) -> None:
        for found in [*self._live.values(), *self._unproven.values()]:
            found.fail(error)
        self._live.clear()
        self._unproven.clear()

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def _end(self, error: PeerllmError) -> None:
        if self._failure is None:
            self._failure = error
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None
        self._drop_attempts(self._failure)
        self._wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _next(self) -> None:
        """Until anything has changed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _nth(values: tuple[float, ...], index: int) -> float:
    return values[min(index, len(values) - 1)]


def _keep_newest(table: dict[bytes, Attempt], tag: bytes, found: Attempt) -> None:
    while len(table) >= limits.MAX_ATTEMPTS:
        table.pop(next(iter(table))).fail(PeerAway("A newer attempt to connect took this one's place."))
    table[tag] = found
