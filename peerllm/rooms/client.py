"""What the daemon calls: open a room, join one, meet a peer again."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.protocol import limits
from peerllm.protocol.errors import (
    RoomError,
    RoomNotFound,
    SignalingUnreachable,
)
from peerllm.rooms import keys, pake, server, wire
from peerllm.rooms.codes import RoomCode
from peerllm.rooms.room import Room, new_token, open_room
from peerllm.rooms.seated import SeatedPeer
from peerllm.rooms.wire import Introduction


class RoomClient:
    """Rooms on one signaling server, with the keys of one state directory.

    Args:
        insecure: allow `ws://` to servers that are not on this machine, as PEERLLM_INSECURE=1 does.
        clock: Unix time; tests give their own.
    """

    def __init__(
        self,
        signaling_url: str,
        state_dir: Path,
        *,
        insecure: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.signaling_url = signaling_url
        self.store = keys.KeyStore(state_dir)
        self.versions = wire.VERSIONS
        self._insecure = insecure or os.environ.get("PEERLLM_INSECURE") == "1"
        self._clock = clock

    async def open(self, *, seats: int = 1, on_guess: Callable[[int, int], None] | None = None) -> Room:
        """A room with a fresh code for `seats` further peers. `on_guess(guesses, left)` hears of every wrong guess.

        Raises:
            SignalingUnreachable, RoomError: in words.
        """
        identity = await asyncio.to_thread(self.store.identity)
        token = new_token()
        socket, number = await open_room(self.signaling_url, token, seats, insecure=self._insecure)

        async def seat(paired: pake.Paired) -> SeatedPeer:
            return await self._seat(identity, paired)

        return Room(
            socket,
            number,
            token,
            identity,
            url=self.signaling_url,
            insecure=self._insecure,
            seats=seats,
            seat=seat,
            on_guess=on_guess,
            versions=self.versions,
        )

    async def join(self, code: str) -> SeatedPeer:
        """The peer that opened the room of this code. Ends within JOIN_SECONDS.

        Raises:
            WrongCode, RoomNotFound, RoomCrowded, RoomClosed, VersionMismatch, SignalingUnreachable, RoomError,
            ProtocolError: each says what happened and what to do.
        """
        parsed = RoomCode.parse(code)
        identity = await asyncio.to_thread(self.store.identity)
        begun = time.monotonic()
        until = begun + limits.JOIN_SECONDS
        while True:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    paired, known = await self._claim(parsed, identity)
                break
            except TimeoutError:
                raise RoomError(
                    "Joining took too long: the peer that opened the room does not answer, or the signaling server "
                    "withholds what it says. Try again."
                ) from None
            except server.TryAgain:
                if time.monotonic() + 1 > until:
                    raise
                await asyncio.sleep(random.uniform(0.2, 0.8))
            except RoomNotFound:
                pause = limits.ROOM_MISSING_PAUSE_SECONDS * random.uniform(0.7, 1.3)
                if time.monotonic() + pause > min(begun + limits.ROOM_MISSING_SECONDS, until):
                    raise
                await asyncio.sleep(pause)
        return self._make_seated(identity, known, paired.introductions)

    async def resume(self, room: str | None = None) -> SeatedPeer:
        """A peer met before, without words: the named room, or the one met last.

        Raises:
            RoomNotFound: it is not known here.
        """
        known = await asyncio.to_thread(self.store.room, room)
        identity = await asyncio.to_thread(self.store.identity)
        server.check_url(self.signaling_url, insecure=self._insecure)
        await asyncio.to_thread(self.store.remember, dataclasses.replace(known, met_at=int(self._clock())))
        return self._make_seated(identity, known)

    async def _claim(self, code: RoomCode, identity: X25519PrivateKey) -> tuple[pake.Paired, keys.KnownRoom]:
        """The pairing is remembered before the opener can believe in it: what breaks after that, `resume` mends."""
        public = identity.public_key().public_bytes_raw()
        joiner = pake.Joiner(code.number, code.password, public, versions=self.versions)
        socket, greeting = await _both(self.signaling_url, joiner, self._insecure)
        try:
            await socket.say("claim", room=code.number, greeting=base64.b64encode(greeting).decode())
            confirmation = await asyncio.to_thread(joiner.take_greeting, await _body(socket))
            await socket.send(confirmation)
            done, paired = joiner.take_confirmation(await _body(socket))
            if paired.remote_key == public:
                raise RoomError("This room was opened by this very daemon, or by a copy of its state directory.")
            known = self._known(public, paired, is_opener=False)
            before = await asyncio.to_thread(self._remember, known)
            await socket.send(done)
            await self._until_seated(socket, known, before)
            return paired, known
        finally:
            await socket.close()

    async def _until_seated(
        self, socket: server.ServerSocket, known: keys.KnownRoom, before: keys.KnownRoom | None
    ) -> None:
        """Takes the pairing back if the opener did: then `before` is what is known of that peer."""
        try:
            await _seated(socket)
        except (server.TryAgain, SignalingUnreachable):
            raise
        except RoomError:
            if before is None:
                await asyncio.to_thread(self.store.forget, known.name)
            else:
                await asyncio.to_thread(self.store.remember, before)
            raise

    async def _seat(self, identity: X25519PrivateKey, paired: pake.Paired) -> SeatedPeer:
        known = self._known(identity.public_key().public_bytes_raw(), paired, is_opener=True)
        await asyncio.to_thread(self.store.remember, known)
        return self._make_seated(identity, known)

    def _known(self, public: bytes, paired: pake.Paired, *, is_opener: bool) -> keys.KnownRoom:
        now = int(self._clock())
        return keys.KnownRoom(
            name=keys.room_name(public, paired.remote_key),
            peer=paired.remote_key.hex(),
            is_opener=is_opener,
            signaling=self.signaling_url,
            paired_at=now,
            met_at=now,
        )

    def _remember(self, known: keys.KnownRoom) -> keys.KnownRoom | None:
        """Gives what was known under that name before. Blocks."""
        before = next((room for room in self.store.rooms() if room.name == known.name), None)
        self.store.remember(known)
        return before

    def _make_seated(
        self, identity: X25519PrivateKey, known: keys.KnownRoom, introductions: tuple[Introduction, ...] = ()
    ) -> SeatedPeer:
        peer = SeatedPeer(
            identity,
            known.remote_key,
            is_opener=known.is_opener,
            signaling_url=self.signaling_url,
            insecure=self._insecure,
            room_name=known.name,
            versions=self.versions,
            introductions=introductions,
            is_known=lambda: self.store.knows(known.name),
            clock=self._clock,
        )
        peer.start()
        return peer


async def _both(url: str, joiner: pake.Joiner, insecure: bool) -> tuple[server.ServerSocket, bytes]:
    """Connects and computes the greeting at the same time."""
    greeting = asyncio.create_task(asyncio.to_thread(joiner.greeting))
    try:
        socket = await server.connect(url, insecure=insecure)
    except BaseException:
        await asyncio.gather(greeting, return_exceptions=True)
        raise
    try:
        return socket, await greeting
    except BaseException:
        await socket.close()
        raise


async def _body(socket: server.ServerSocket) -> bytes:
    """What the opener says next. Raises what the server says in its place."""
    while True:
        message = await socket.receive()
        if isinstance(message, bytes):
            return message
        if message["op"] == "error":
            raise server.error_of(message.get("code"))


async def _seated(socket: server.ServerSocket) -> None:
    """Raises SignalingUnreachable when the connection breaks: the opener may have seated this peer, or not."""
    while True:
        try:
            message = await socket.receive()
        except SignalingUnreachable:
            raise SignalingUnreachable(
                "The connection was lost at the last step. Try `peerllm resume`, or ask for a new code if the other "
                "peer does not come there."
            ) from None
        if isinstance(message, dict):
            if message["op"] == "seated":
                return
            if message["op"] == "error":
                raise server.error_of(message.get("code"))
