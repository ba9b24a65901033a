"""From three spoken words to an authenticated exchange of long-term keys: SPAKE2 and key confirmation, sans-I/O.

    joiner                                   opener
      greeting            ─────────────────>   answers every greeting with a fresh SPAKE2 state
                          <─────────────────  greeting
      confirmation, key   ─────────────────>   a wrong one is a guess: counted, shown, and refused
                          <─────────────────  confirmation, key
      done                ─────────────────>   seated

The joiner confirms first, so that the opener hears of every guess before it has given anything away by which one could
be checked. One run allows one guess, on either side; nothing in it can be tried out later (RFC 9382, section 7).

The methods that take a greeting or a confirmation compute for some 20 ms: run them off the event loop.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError, VersionMismatch, WrongCode
from peerllm.rooms import wire
from peerllm.rooms.wire import Credentials, Introduction, Versions

_APPLICATION = b"peerllm room "
_NONCE = bytes(12)  # each key seals one message
_LYING_SERVER = "The signaling server, or something before it, changes messages between the two peers."

Entropy = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Paired:
    """What both ends know when the words are spent."""

    remote_key: bytes
    version: int
    place: int
    introductions: tuple[Introduction, ...]


@dataclass(frozen=True, slots=True)
class _Keys:
    opener_mac: bytes
    joiner_mac: bytes
    done_mac: bytes
    opener_seal: bytes
    joiner_seal: bytes
    transcript: bytes


class Opener:
    """The opener's end of one claim. A claim has a state of its own: SPAKE2 states are never used twice."""

    def __init__(
        self,
        number: int,
        password: bytes,
        key: bytes,
        *,
        place: int = 1,
        introductions: tuple[Introduction, ...] = (),
        versions: Versions = wire.VERSIONS,
        entropy: Entropy = os.urandom,
    ) -> None:
        self._number = number
        self._spake = SPAKE2_A(password, *_identities(number), entropy_f=entropy)
        self._key = key
        self._place = place
        self._introductions = introductions
        self._versions = versions
        self._heard = Versions(0, 0)
        self._version = 0
        self._theirs = b""
        self._ours = b""
        self._keys: _Keys | None = None
        self._remote_key = b""

    def take_greeting(self, data: bytes) -> bytes:
        """Gives our greeting.

        Raises:
            VersionMismatch, ProtocolError: answer with `refusal_of` and end.
        """
        self._heard, self._theirs = wire.unpack_greeting(data)
        self._version = self._versions.common(self._heard)
        self._ours = self._spake.start()
        return wire.pack_greeting(self._versions, self._ours)

    def take_confirmation(self, data: bytes) -> bytes:
        """Gives our confirmation.

        Raises:
            WrongCode: a guess.
            ProtocolError: not a confirmation at all; no guess either.
        """
        mac, sealed = wire.split(data, wire.CONFIRM, wire.MAC_BYTES)
        try:
            secret = _finish(self._spake, self._theirs)
        except ProtocolError as error:
            raise WrongCode("A peer tried to join with an invalid message.") from error
        keys = _derive(secret, self._number, joiner=self._theirs, opener=self._ours)
        if not hmac.compare_digest(mac, _mac(keys.joiner_mac, keys.transcript)):
            raise WrongCode("A peer tried to join with wrong words.")
        credentials = _unseal(keys.joiner_seal, keys.transcript, sealed)
        _check_versions(credentials, self._versions, self._heard)
        self._keys, self._remote_key = keys, credentials.key
        ours = Credentials(
            key=self._key,
            said_low=self._versions.low,
            said_high=self._versions.high,
            heard_low=self._heard.low,
            heard_high=self._heard.high,
            place=self._place,
            introductions=self._introductions,
        )
        sealed = _seal(keys.opener_seal, keys.transcript, ours)
        return bytes([wire.CONFIRM]) + _mac(keys.opener_mac, keys.transcript) + sealed

    def take_done(self, data: bytes) -> Paired:
        """Raises ProtocolError unless it is the joiner's."""
        if self._keys is None:
            raise ProtocolError("a peer that is done before it confirmed")
        mac, rest = wire.split(data, wire.DONE, wire.MAC_BYTES)
        if rest or not hmac.compare_digest(mac, _mac(self._keys.done_mac, self._keys.transcript)):
            raise ProtocolError(f"The last message of a joining peer is not its own. {_LYING_SERVER}")
        return Paired(self._remote_key, self._version, self._place, self._introductions)


class Joiner:
    """The joiner's end."""

    def __init__(
        self,
        number: int,
        password: bytes,
        key: bytes,
        *,
        versions: Versions = wire.VERSIONS,
        entropy: Entropy = os.urandom,
    ) -> None:
        self._number = number
        self._spake = SPAKE2_B(password, *_identities(number), entropy_f=entropy)
        self._key = key
        self._versions = versions
        self._heard = Versions(0, 0)
        self._version = 0
        self._ours = b""
        self._keys: _Keys | None = None

    def greeting(self) -> bytes:
        self._ours = self._spake.start()
        return wire.pack_greeting(self._versions, self._ours)

    def take_greeting(self, data: bytes) -> bytes:
        """Gives our confirmation.

        Raises:
            VersionMismatch, WrongCode: the opener's refusal, in words.
            ProtocolError: anything else.
        """
        _raise_refusal(data, self._versions)
        self._heard, theirs = wire.unpack_greeting(data)
        self._version = self._versions.common(self._heard)
        secret = _finish(self._spake, theirs)
        keys = self._keys = _derive(secret, self._number, joiner=self._ours, opener=theirs)
        ours = Credentials(
            key=self._key,
            said_low=self._versions.low,
            said_high=self._versions.high,
            heard_low=self._heard.low,
            heard_high=self._heard.high,
        )
        sealed = _seal(keys.joiner_seal, keys.transcript, ours)
        return bytes([wire.CONFIRM]) + _mac(keys.joiner_mac, keys.transcript) + sealed

    def take_confirmation(self, data: bytes) -> tuple[bytes, Paired]:
        """Gives the last message and the result.

        Raises:
            WrongCode: the words differ, or whoever answers does not know them.
            ProtocolError: anything else.
        """
        _raise_refusal(data, self._versions)
        keys = self._keys
        if keys is None:
            raise ProtocolError("a confirmation before a greeting")
        mac, sealed = wire.split(data, wire.CONFIRM, wire.MAC_BYTES)
        if not hmac.compare_digest(mac, _mac(keys.opener_mac, keys.transcript)):
            raise WrongCode(
                "Whoever answered does not know the words of this code: it is not the peer that opened the room."
            )
        credentials = _unseal(keys.opener_seal, keys.transcript, sealed)
        _check_versions(credentials, self._versions, self._heard)
        done = bytes([wire.DONE]) + _mac(keys.done_mac, keys.transcript)
        return done, Paired(credentials.key, self._version, credentials.place, credentials.introductions)


def refusal_of(error: Exception, versions: Versions = wire.VERSIONS) -> bytes:
    """What the opener tells a claimer whose claim ended with this error."""
    if isinstance(error, WrongCode):
        return wire.pack_refused(wire.WRONG_CODE, versions)
    if isinstance(error, VersionMismatch):
        return wire.pack_refused(wire.UNEQUAL_RELEASES, versions)
    return wire.pack_refused(wire.MALFORMED, versions)


def _raise_refusal(data: bytes, versions: Versions) -> None:
    if data[:1] != bytes([wire.REFUSED]):
        return
    reason, theirs = wire.unpack_refused(data)
    if reason == wire.WRONG_CODE:
        raise WrongCode("The words of this code are not those of the room. Ask for the code again: one typo is enough.")
    if reason == wire.UNEQUAL_RELEASES:
        versions.common(theirs)
    raise ProtocolError(f"The peer that opened the room could not read our message. {_LYING_SERVER}")


def _identities(number: int) -> tuple[bytes, bytes]:
    """Application, role and room number, bound into SPAKE2's key (RFC 9382, section 3.3)."""
    room = _APPLICATION + str(number).encode()
    return room + b" opener", room + b" joiner"


def _finish(spake: SPAKE2_A | SPAKE2_B, element: bytes) -> bytes:
    try:
        return bytes(spake.finish(element))
    except Exception as error:
        # The library has a different exception for every way in which a stranger's bytes can be no group element.
        raise ProtocolError(f"not an element that a peer sends ({type(error).__name__}). {_LYING_SERVER}") from error


def _derive(secret: bytes, number: int, *, joiner: bytes, opener: bytes) -> _Keys:
    transcript = hashlib.sha256(_APPLICATION + str(number).encode() + b"\0" + joiner + opener).digest()
    length = 5 * 32
    okm = HKDF(hashes.SHA256(), length, salt=transcript, info=b"peerllm pairing 1").derive(secret)
    parts = [okm[start : start + 32] for start in range(0, length, 32)]
    return _Keys(parts[0], parts[1], parts[2], parts[3], parts[4], transcript)


def _mac(key: bytes, transcript: bytes) -> bytes:
    # HMAC and not the seal's tag confirms the key: Poly1305 does not commit to its key.
    return hmac.new(key, transcript, hashlib.sha256).digest()


def _seal(key: bytes, transcript: bytes, credentials: Credentials) -> bytes:
    return ChaCha20Poly1305(key).encrypt(_NONCE, credentials.encode(), transcript)


def _unseal(key: bytes, transcript: bytes, sealed: bytes) -> Credentials:
    if len(sealed) > limits.MAX_SIGNALING_FRAME_BYTES:
        raise ProtocolError("credentials that are too long")
    try:
        return Credentials.decode(ChaCha20Poly1305(key).decrypt(_NONCE, sealed, transcript))
    except InvalidTag:
        raise ProtocolError(f"The other peer's key does not arrive unchanged. {_LYING_SERVER}") from None


def _check_versions(theirs: Credentials, ours: Versions, heard: Versions) -> None:
    said, came = Versions(theirs.said_low, theirs.said_high), Versions(theirs.heard_low, theirs.heard_high)
    if said != heard or came != ours:
        raise ProtocolError(f"The versions that the peers told each other arrived changed. {_LYING_SERVER}")
