"""Noise_KK_25519_ChaChaPoly_SHA256: a handshake between two who know each other's long-term keys, sans-I/O.

    -> e, es, ss
    <- e, ee, se

From the Noise Protocol Framework, revision 34, sections 5 and 7.5. Each attempt to connect has a handshake of its own:
new ephemeral keys, so new session keys, also when a state directory was restored from a copy; nothing here is stored.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from peerllm.protocol.errors import ProtocolError

NAME = b"Noise_KK_25519_ChaChaPoly_SHA256"
KEY_BYTES = 32
TAG_BYTES = 16
_LAST_NONCE = (1 << 64) - 2  # the very last is reserved (section 5.1)


class SealedDirection:
    """A key and the counter that is its nonce. It only counts up: no nonce is ever used twice."""

    __slots__ = ("_aead", "counter")

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self.counter = 0

    def _nonce(self) -> bytes:
        if self.counter > _LAST_NONCE:
            raise ProtocolError("a key is worn out")
        return bytes(4) + self.counter.to_bytes(8, "little")

    def seal(self, plain: bytes, associated: bytes) -> bytes:
        nonce = self._nonce()
        self.counter += 1
        return self._aead.encrypt(nonce, plain, associated)

    def open(self, sealed: bytes, associated: bytes) -> bytes:
        """Raises ProtocolError; the counter stays, so that what is forged does not shut out what is real."""
        try:
            plain = self._aead.decrypt(self._nonce(), sealed, associated)
        except InvalidTag:
            raise ProtocolError("a message that was not sealed by the other peer, or not in this place") from None
        self.counter += 1
        return plain


@dataclass(frozen=True, slots=True)
class Keys:
    """What a finished handshake gives. `session` is the same on both sides, and no key of either direction."""

    sending: SealedDirection
    receiving: SealedDirection
    session: bytes


class _Symmetric:
    """Section 5.2's SymmetricState."""

    def __init__(self, prologue: bytes) -> None:
        self.h = NAME  # exactly HASHLEN bytes long
        self.ck = NAME
        self._cipher: SealedDirection | None = None
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.h = hashlib.sha256(self.h + data).digest()

    def mix_key(self, material: bytes) -> None:
        self.ck, key, _ = _hkdf(self.ck, material)
        self._cipher = SealedDirection(key)

    def encrypt(self, plain: bytes) -> bytes:
        if self._cipher is None:
            raise ProtocolError("nothing may be sealed before a key is mixed in")
        sealed = self._cipher.seal(plain, self.h)
        self.mix_hash(sealed)
        return sealed

    def decrypt(self, sealed: bytes) -> bytes:
        if self._cipher is None:
            raise ProtocolError("nothing may be opened before a key is mixed in")
        plain = self._cipher.open(sealed, self.h)
        self.mix_hash(sealed)
        return plain

    def split(self, *, is_initiator: bool) -> Keys:
        first, second, third = _hkdf(self.ck, b"")
        # Section 5.2 splits two keys off; HKDF's third output is independent of both, and h binds it to this run.
        session = hmac.new(third, b"peerllm session" + self.h, hashlib.sha256).digest()
        mine, theirs = (first, second) if is_initiator else (second, first)
        return Keys(SealedDirection(mine), SealedDirection(theirs), session)


class Initiator:
    """The end that begins. `ephemeral` is given by tests alone."""

    def __init__(
        self,
        static: X25519PrivateKey,
        remote: X25519PublicKey,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._static, self._remote = static, remote
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._state = _Symmetric(prologue)
        self._state.mix_hash(_raw(static.public_key()))
        self._state.mix_hash(_raw(remote))

    def first_message(self, payload: bytes) -> bytes:
        ours = _raw(self._ephemeral.public_key())
        self._state.mix_hash(ours)
        self._state.mix_key(_exchange(self._ephemeral, self._remote))
        self._state.mix_key(_exchange(self._static, self._remote))
        return ours + self._state.encrypt(payload)

    def take_second(self, message: bytes) -> tuple[bytes, Keys]:
        """The payload and the keys. Raises ProtocolError; the handshake is then over."""
        theirs = _take_key(message)
        self._state.mix_hash(message[:KEY_BYTES])
        self._state.mix_key(_exchange(self._ephemeral, theirs))
        self._state.mix_key(_exchange(self._static, theirs))
        return self._state.decrypt(message[KEY_BYTES:]), self._state.split(is_initiator=True)


class Responder:
    """The other end."""

    def __init__(
        self,
        static: X25519PrivateKey,
        remote: X25519PublicKey,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._static, self._remote = static, remote
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._state = _Symmetric(prologue)
        self._state.mix_hash(_raw(remote))
        self._state.mix_hash(_raw(static.public_key()))
        self._theirs: X25519PublicKey | None = None

    def take_first(self, message: bytes) -> bytes:
        """The payload. A first message can be a replay: only what comes under the final keys proves that it is not."""
        theirs = self._theirs = _take_key(message)
        self._state.mix_hash(message[:KEY_BYTES])
        self._state.mix_key(_exchange(self._static, theirs))
        self._state.mix_key(_exchange(self._static, self._remote))
        return self._state.decrypt(message[KEY_BYTES:])

    def second_message(self, payload: bytes) -> tuple[bytes, Keys]:
        if self._theirs is None:
            raise ProtocolError("an answer before the first message")
        ours = _raw(self._ephemeral.public_key())
        self._state.mix_hash(ours)
        self._state.mix_key(_exchange(self._ephemeral, self._theirs))
        self._state.mix_key(_exchange(self._ephemeral, self._remote))
        return ours + self._state.encrypt(payload), self._state.split(is_initiator=False)


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes, bytes]:
    """Section 4.3's HKDF with three outputs; the first two are those of the call with two."""
    temp = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temp, b"\x01", "sha256")
    second = hmac.digest(temp, first + b"\x02", "sha256")
    return first, second, hmac.digest(temp, second + b"\x03", "sha256")


def _raw(key: X25519PublicKey) -> bytes:
    return key.public_bytes_raw()


def _take_key(message: bytes) -> X25519PublicKey:
    if len(message) < KEY_BYTES + TAG_BYTES:
        raise ProtocolError("a handshake message that is cut short")
    return X25519PublicKey.from_public_bytes(message[:KEY_BYTES])


def _exchange(private: X25519PrivateKey, public: X25519PublicKey) -> bytes:
    try:
        return private.exchange(public)
    except ValueError:  # the result is zero: a point of small order (RFC 7748, section 6.1)
        raise ProtocolError("a public key that no honest peer has") from None
