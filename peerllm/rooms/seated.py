"""A peer that was authenticated once: it is met again at the rendezvous, and each attempt has fresh keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import PeerAway, PeerllmError, ProtocolError, RoomClosed, VersionMismatch
from peerllm.protocol.fields import from_map, to_map
from peerllm.rooms import attempt as attempts
from peerllm.rooms import keys, wire
from peerllm.rooms.attempt import Attempt, Beginning
from peerllm.rooms.rendezvous import Rendezvous
from peerllm.rooms.servers import IceServers
from peerllm.rooms.wire import Introduction, Versions


@dataclass(slots=True)
class _Pending:
    beginning: Beginning
    done: asyncio.Future[Attempt]


class SeatedPeer:
    """Satisfies `link.signaling.SeatedPeer`. `start` begins to keep a connection to the signaling server.

    Args:
        identity: this peer's long-term key. Its public part is `local_id`.
        remote_id: the other's public key.
        introductions: further peers of the room, as the opener introduced them.
        is_known: whether the room is still known here, asked in a thread before each attempt.
    """

    def __init__(
        self,
        identity: X25519PrivateKey,
        remote_id: bytes,
        *,
        is_opener: bool,
        signaling_url: str,
        insecure: bool = False,
        room_name: str = "",
        versions: Versions = wire.VERSIONS,
        introductions: Iterable[Introduction] = (),
        is_known: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.local_id = identity.public_key().public_bytes_raw()
        self.remote_id = remote_id
        self.is_opener = is_opener
        self.room_name = room_name
        self.versions = versions
        self.introductions = list(introductions)
        self.on_introduction: Callable[[Introduction], None] | None = None
        self._identity = identity
        self._is_known = is_known
        self._remote = X25519PublicKey.from_public_bytes(remote_id)
        self._rendezvous = Rendezvous(
            signaling_url,
            0 if self.is_controlling else 1,
            lambda now: keys.meeting_ids(identity, remote_id, now),
            self,
            insecure=insecure,
            clock=clock,
        )
        self._failure: PeerllmError | None = None
        self._complaint: ProtocolError | None = None
        """What was last received that the other peer cannot have sent."""
        self._pending: dict[bytes, _Pending] = {}
        self._unproven: dict[bytes, Attempt] = {}
        """Begun by the other side, perhaps by a replay: not accepted until a message under the new keys comes."""
        self._live: dict[bytes, Attempt] = {}
        self._accepted: Attempt | None = None
        self._absence: asyncio.TimerHandle | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_controlling(self) -> bool:
        """The smaller key begins attempts; the other accepts them."""
        return self.local_id < self.remote_id

    @property
    def ice_servers(self) -> IceServers:
        """What the signaling server offers; filled when it is reached."""
        return self._rendezvous.ice_servers

    # --- What the link calls ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._rendezvous.start()

    async def begin(self, epoch: int) -> Attempt:
        """A new attempt, with fresh keys. Safe to cancel.

        Raises:
            PeerAway: the other peer is not there or does not answer within ATTEMPT_SECONDS.
            SignalingUnreachable, RoomClosed: the server, or this peer's place, is gone.
            VersionMismatch: releases without a version in common.
            ProtocolError: someone answers for the other peer.
        """
        await self._check_known()
        self._rendezvous.suspect_if_quiet()
        was_present = False
        try:
            async with asyncio.timeout(limits.ATTEMPT_SECONDS):
                while True:
                    while not self._rendezvous.can_talk:
                        self._check()
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
            if self._accepted is not None:
                await self._check_known()  # before it is taken: a cancelled call leaves it to the next
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
        self._rendezvous.suspect()

    async def offered(self, seconds: float) -> IceServers:
        """What the signaling server offers for the link, or nothing if it is not reached in time. Relays are offered
        once the other peer is there; this waits for that too, in the same time.

        Raises:
            RoomClosed: this peer's place is gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._rendezvous.can_talk:
                    self._check()
                    await self._next()
        return self.ice_servers

    async def renew_turn(self) -> None:
        """Asks for fresh TURN credentials; `ice_servers` has them as soon as they come. Without an answer if the server
        offers none."""
        await self._rendezvous.renew_turn()

    async def introduce(self, found: Attempt, introduction: Introduction) -> None:
        """Tells the peer of a further one, sealed in an attempt."""
        await found.send_sealed(wire.INTRODUCTION, cbor.encode(to_map(introduction)))

    async def close(self) -> None:
        self.on_end(RoomClosed("This peer left the room."))
        await self._rendezvous.close()

    # --- The handshake ------------------------------------------------------------------------------------------------

    async def _shake_hands(self, epoch: int) -> Attempt | None:
        """None when the other peer's connection was replaced meanwhile: it never saw the beginning."""
        presence = self._rendezvous.presence
        beginning = Beginning(self._identity, self._remote, epoch, self.versions)
        pending = _Pending(beginning, asyncio.get_running_loop().create_future())
        self._pending[beginning.tag] = pending
        try:
            try:
                await self._post(beginning.frame)
            except PeerAway:
                await self._next()  # the socket is dead, and its reader has not noticed yet
                return None
            while not pending.done.done():
                if not self._rendezvous.can_talk or presence != self._rendezvous.presence:
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

    def _why_nobody(self, was_present: bool) -> PeerllmError:
        if self._complaint is not None:
            return self._complaint
        if self._rendezvous.socket is None and self._rendezvous.trouble is not None:
            return self._rendezvous.trouble
        if was_present:
            return PeerAway("The other peer does not answer through the signaling server.")
        return PeerAway(
            "The other peer is not at the signaling server. Is peerllm running there? Are both clocks right to a day?"
        )

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
            tag, frame, epoch, made = attempts.answer(self._identity, self._remote, data, self.versions)
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
        await self._rendezvous.post(frame)

    # --- What the rendezvous tells ------------------------------------------------------------------------------------

    def on_frame(self, frame: bytes) -> list[bytes]:
        if self._failure is not None:
            return []
        try:
            return self._take(frame)
        except ProtocolError as error:
            self._complaint = attempts.blaming(error)
            return []

    def on_presence(self, is_present: bool) -> None:
        if is_present:
            self._forget_absence()
        elif self._absence is None and (self._live or self._unproven):
            self._absence = asyncio.get_running_loop().call_later(limits.ABSENCE_SECONDS, self._give_up_attempts)

    def on_change(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def on_end(self, error: PeerllmError) -> None:
        if self._failure is None:
            self._failure = error
        self._forget_absence()
        self._drop_attempts(self._failure)
        self.on_change()

    def _forget_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _give_up_attempts(self) -> None:
        self._absence = None
        self._drop_attempts(PeerAway("The other peer left the signaling server."))

    def _drop_attempts(self, error: PeerllmError) -> None:
        for found in [*self._live.values(), *self._unproven.values()]:
            found.fail(error)
        self._live.clear()
        self._unproven.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _check_known(self) -> None:
        self._check()
        if not await asyncio.to_thread(self._is_known):
            self.on_end(RoomClosed("This room was forgotten here. To meet that peer again, both need a new code."))
        self._check()

    async def _next(self) -> None:
        """Until anything has changed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


def _keep_newest(table: dict[bytes, Attempt], tag: bytes, found: Attempt) -> None:
    while len(table) >= limits.MAX_ATTEMPTS:
        table.pop(next(iter(table))).fail(PeerAway("A newer attempt to connect took this one's place."))
    table[tag] = found
