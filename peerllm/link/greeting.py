"""From an open channel to two sides that have proved themselves: HELLO, CONFIRM, START. Sans-I/O: frames in and out.

Both sides send HELLO with their body, and CONFIRM when the other's HELLO has come; the controlling side then sends
START on the connection that it takes. On a lossy path they come in any order. Nothing else is processed before them;
what overtook them waits, bounded.
"""

from __future__ import annotations

import hmac

from peerllm.link import frames, hello
from peerllm.link.frames import Frame, Kind
from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import LinkError, PeerllmError, ProtocolError, error_from_code

_MAX_EARLY_FRAMES = 256
"""Frames that overtook START on a lossy path: two windows of slices."""


class PeerRefused(LinkError):
    """The other side will not go on; `cause` is its reason, typed."""

    def __init__(self, cause: PeerllmError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Greeting:
    """
    Args:
        key: the attempt's, which the room authenticated.
        fingerprints: of this side's DTLS certificate and of the other's, as the room told it.
        body: this side's.
    """

    def __init__(
        self, *, is_controlling: bool, epoch: int, key: bytes, fingerprints: tuple[bytes, bytes], body: bytes
    ) -> None:
        self._is_controlling = is_controlling
        self._epoch = epoch
        self._key = key
        self._fingerprints = fingerprints
        self._body = body
        self._pending_mac: bytes | None = None
        self._early: list[Frame] = []
        self._is_confirmed = False
        self._is_started = False
        self.remote_body: bytes | None = None

    @property
    def is_done(self) -> bool:
        """Both sides are proved, and on the controlled side the other took this connection."""
        return self._is_confirmed and (self._is_controlling or self._is_started)

    def first(self) -> bytes:
        """This side's HELLO."""
        return frames.encode_control(Kind.HELLO, self._epoch, hello.encode_hello(self._body))

    def take(self, frame: Frame) -> bytes | None:
        """One frame; gives the one to answer with.

        Raises:
            ProtocolError: what came does not fit this connection.
            PeerRefused: the other side said why it will not go on.
        """
        if frame.kind is Kind.HELLO and self.remote_body is None:
            self.remote_body = hello.decode_hello(frame.body)
            self._check()
            return frames.encode_control(Kind.CONFIRM, self._epoch, self._mac(of_controlling=self._is_controlling))
        if frame.kind is Kind.CONFIRM and self._pending_mac is None:
            self._pending_mac = frame.body
            self._check()
        elif frame.kind is Kind.START and not self._is_controlling:
            self._is_started = True
        elif frame.kind is Kind.REFUSE:
            raise refusal(frame.body)
        elif len(self._early) < _MAX_EARLY_FRAMES:
            self._early.append(frame)
        else:
            raise ProtocolError("too many frames before HELLO was complete")
        return None

    def take_early(self) -> list[Frame]:
        """Frames that came before they could be processed."""
        early, self._early = self._early, []
        return early

    def _check(self) -> None:
        if self._pending_mac is None or self.remote_body is None:
            return
        if not hmac.compare_digest(self._pending_mac, self._mac(of_controlling=not self._is_controlling)):
            raise ProtocolError("the other peer's HELLO does not fit this connection: somebody is between the two")
        self._is_confirmed = True

    def _mac(self, *, of_controlling: bool) -> bytes:
        bodies = (self._body, self.remote_body or b"")
        mine, theirs = (0, 1) if self._is_controlling else (1, 0)
        return hello.mac(
            self._key,
            from_controlling=of_controlling,
            epoch=self._epoch,
            controlling_fingerprint=self._fingerprints[mine],
            controlled_fingerprint=self._fingerprints[theirs],
            controlling_body=bodies[mine],
            controlled_body=bodies[theirs],
        )


def encode_refusal(epoch: int, error: PeerllmError) -> bytes:
    body = cbor.encode({"code": error.code, "message": error.message[:1024]})
    return frames.encode_control(Kind.REFUSE, epoch, body)


def refusal(body: bytes) -> PeerRefused:
    """What a REFUSE says. Raises ProtocolError when it says nothing."""
    value = cbor.decode(body, max_bytes=limits.MAX_HELLO_BYTES)
    if not isinstance(value, dict) or type(value.get("code")) is not str or type(value.get("message")) is not str:
        raise ProtocolError("a refusal without its reason")
    return PeerRefused(error_from_code(value["code"], value["message"]))
