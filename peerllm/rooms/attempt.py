"""One attempt to connect: a fresh handshake, then sealed messages in order. Sans-I/O but for one queue."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import PeerllmError, ProtocolError, VersionMismatch
from peerllm.protocol.fields import from_map, to_map, uint
from peerllm.rooms import noise, wire
from peerllm.rooms.wire import Versions

TAMPERED = "The signaling server, or something before it, changes, repeats or withholds messages between the two peers."
_PROLOGUE = b"peerllm attempt 1"


@dataclass(frozen=True, slots=True)
class _First:
    """Sealed in the first handshake message."""

    epoch: int = uint((1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class _Second:
    """Sealed in the second: the version that was chosen, and what the responder speaks."""

    version: int = uint(0xFFFF)
    low: int = uint(0xFFFF)
    high: int = uint(0xFFFF)


def blaming(error: ProtocolError) -> ProtocolError:
    """The error with its cause: nothing that the other peer sends breaks a rule, so what does was put in its place."""
    if TAMPERED in error.message:
        return error
    return ProtocolError(f"Not what the other peer sent: {error.message}. {TAMPERED}")


class Attempt:
    """Satisfies `link.signaling.Attempt`. `post` sends a frame to the other peer."""

    def __init__(self, tag: bytes, epoch: int, keys: noise.Keys, post: Callable[[bytes], Awaitable[None]]) -> None:
        self.tag = tag
        self.epoch = epoch
        self.session_key = keys.session
        self._keys = keys
        self._post = post
        self._bodies: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._failure: PeerllmError | None = None
        self._sending = asyncio.Lock()

    async def send(self, body: bytes) -> None:
        """Sealed, in order; at most MAX_SIGNALING_BYTES.

        Raises:
            PeerAway, RoomError, ProtocolError: the attempt is over.
        """
        if len(body) > limits.MAX_SIGNALING_BYTES:
            raise ProtocolError(
                f"a signaling message of {len(body)} bytes; at most {limits.MAX_SIGNALING_BYTES} are allowed"
            )
        await self.send_sealed(wire.BODY, body)

    async def send_sealed(self, what: int, body: bytes = b"") -> None:
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            header = wire.sealed_header(self.tag, self._keys.sending.counter)
            sealed = self._keys.sending.seal(bytes([what]) + body, header)
            try:
                await self._post(header + sealed)
            except PeerllmError as error:
                self.fail(error)  # its counter is spent: what follows could only be refused at the other end
                raise

    async def receive(self) -> bytes:
        """The next body. Safe to cancel.

        Raises:
            PeerAway, RoomError, ProtocolError: the attempt is over.
        """
        while not self._bodies:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        return self._bodies.popleft()

    def fail(self, error: PeerllmError) -> None:
        """What has arrived can still be read; then `error` is raised."""
        if self._failure is None:
            self._failure = error
            self._news.set()

    @property
    def failure(self) -> PeerllmError | None:
        return self._failure

    def take(self, counter: int, header: bytes, sealed: bytes) -> tuple[int, bytes] | None:
        """What a sealed message is and its content; BODY is queued here and gives None.

        Raises:
            ProtocolError: repeated, out of order, reflected or changed. The attempt is over.
        """
        try:
            if self._failure is not None:
                return None
            expected = self._keys.receiving.counter
            if counter != expected:
                done = "repeated" if counter < expected else "lost or moved"
                raise ProtocolError(f"A signaling message was {done} on its way. {TAMPERED}")
            try:
                plain = self._keys.receiving.open(sealed, header)
            except ProtocolError as error:
                raise ProtocolError(f"A signaling message was changed on its way. {TAMPERED}") from error
            if not plain:
                raise ProtocolError("a sealed message without content")
            if plain[0] != wire.BODY:
                return plain[0], plain[1:]
            if len(self._bodies) >= limits.MAX_QUEUED_SIGNALING:
                raise ProtocolError("the other peer sends more signaling messages than are read")
            self._bodies.append(plain[1:])
            self._news.set()
        except ProtocolError as error:
            self.fail(blaming(error))
            raise
        return None


class Beginning:
    """The initiator's handshake. `frame` is what to send. `tag` and `ephemeral` are given by tests alone."""

    def __init__(
        self,
        static: X25519PrivateKey,
        remote: X25519PublicKey,
        epoch: int,
        versions: Versions,
        *,
        tag: bytes | None = None,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self.tag = tag or os.urandom(wire.ATTEMPT_BYTES)
        self.epoch = epoch
        self._versions = versions
        spoken = wire.pack_range(versions)
        self._handshake = noise.Initiator(static, remote, _PROLOGUE + self.tag + spoken, ephemeral)
        first = self._handshake.first_message(cbor.encode(to_map(_First(epoch))))
        self.frame = bytes([wire.BEGIN]) + self.tag + spoken + first

    def take_answer(self, version: bytes, message: bytes) -> noise.Keys:
        """Raises ProtocolError: it is not the other peer's; the handshake is over."""
        try:
            payload, keys = self._handshake.take_second(message)
        except ProtocolError as error:
            raise ProtocolError(f"What answers is not the peer that this room was made with. {TAMPERED}") from error
        second = from_map(_Second, cbor.decode(payload, max_bytes=limits.MAX_SIGNALING_BYTES))
        chosen = self._versions.common(Versions(second.low, second.high))
        if second.version != chosen or int.from_bytes(version) != chosen:
            raise ProtocolError(f"The versions that the peers told each other arrived changed. {TAMPERED}")
        return keys

    def take_unequal(self, theirs: Versions) -> PeerllmError:
        """What to tell the user when the other peer says that it has no version in common with us."""
        try:
            self._versions.common(theirs)
        except VersionMismatch as error:
            return error
        return ProtocolError(f"The versions that the peers told each other arrived changed. {TAMPERED}")


def answer(
    static: X25519PrivateKey,
    remote: X25519PublicKey,
    data: bytes,
    versions: Versions,
    *,
    ephemeral: X25519PrivateKey | None = None,
) -> tuple[bytes, bytes, int, noise.Keys]:
    """The responder's whole handshake: tag, the frame to answer with, epoch, keys. `ephemeral` is given by tests alone.

    The first message may be a replay. So the attempt counts only once a message under these keys arrives.

    Raises:
        VersionMismatch: nothing in common; answer with `unequal`.
        ProtocolError: it is not the other peer's.
    """
    tag, spoken, message = wire.split(data, wire.BEGIN, wire.ATTEMPT_BYTES, 4)
    version = versions.common(wire.unpack_range(spoken))
    handshake = noise.Responder(static, remote, _PROLOGUE + tag + spoken, ephemeral)
    try:
        payload = handshake.take_first(message)
    except ProtocolError as error:
        raise ProtocolError(f"Someone else than the peer of this room tries to connect. {TAMPERED}") from error
    first = from_map(_First, cbor.decode(payload, max_bytes=limits.MAX_SIGNALING_BYTES))
    second, keys = handshake.second_message(cbor.encode(to_map(_Second(version, *versions))))
    return tag, bytes([wire.ANSWER]) + tag + version.to_bytes(2) + second, first.epoch, keys


def unequal(data: bytes, versions: Versions) -> bytes:
    """The answer to a beginning with which we have no version in common."""
    tag = wire.split(data, wire.BEGIN, wire.ATTEMPT_BYTES)[0]
    return bytes([wire.UNEQUAL]) + tag + wire.pack_range(versions)
