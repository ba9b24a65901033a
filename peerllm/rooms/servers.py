"""STUN and TURN as the signaling server offers them, checked: what it says is not to be trusted, only to be tried."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yarl import URL

from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.fields import from_map, nested, optional, text, text_list, uint, uint_list


@dataclass(frozen=True, slots=True)
class _Turn:
    urls: tuple[str, ...] = text_list(limits.MAX_ICE_SERVERS, limits.MAX_NAME_CHARS)
    username: str = text(limits.MAX_NAME_CHARS)
    credential: str = text(limits.MAX_NAME_CHARS)
    seconds: int = uint(30 * 86400)


@dataclass(frozen=True, slots=True)
class _Offered:
    stun: tuple[int, ...] = uint_list(limits.MAX_ICE_SERVERS, 65535, default=())
    turn: _Turn | None = optional(nested(_Turn))


@dataclass(frozen=True, slots=True)
class TurnServers:
    """Credentials for a TURN server; they end at `ends_at` by the monotonic clock."""

    urls: tuple[str, ...]
    username: str
    credential: str = dataclasses.field(repr=False)
    ends_at: float

    def endpoints(self) -> list[tuple[str, int, str]]:
        """(host, port, transport) of each URL that is one (RFC 7065); transport is udp, tcp or tls."""
        return [found for found in map(_endpoint, self.urls) if found is not None]


@dataclass(frozen=True, slots=True)
class IceServers:
    """`stun` are (host, UDP port)."""

    stun: tuple[tuple[str, int], ...] = ()
    turn: TurnServers | None = None

    def with_stun(self, signaling_url: str, message: Mapping[str, Any]) -> IceServers:
        """The STUN responders run on the signaling server's host; it names their ports."""
        host = URL(signaling_url).host or ""
        return dataclasses.replace(self, stun=tuple((host, port) for port in _offered(message).stun if port))

    def with_turn(self, message: Mapping[str, Any], now: float) -> IceServers:
        turn = _offered(message).turn
        if turn is None:
            return self
        return dataclasses.replace(
            self, turn=TurnServers(turn.urls, turn.username, turn.credential, now + turn.seconds)
        )


_TURN_URL = re.compile(
    r"(?P<scheme>turns?):(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(?P<port>\d{1,5}))?(?:\?transport=(?P<transport>udp|tcp))?"
)
_TURN_PORT, _TURNS_PORT = 3478, 5349


def _endpoint(url: str) -> tuple[str, int, str] | None:
    found = _TURN_URL.fullmatch(url)
    if found is None:
        return None
    is_tls = found["scheme"] == "turns"
    port = int(found["port"] or (_TURNS_PORT if is_tls else _TURN_PORT))
    if not 0 < port < 65536 or (is_tls and found["transport"] == "udp"):  # TURN over DTLS is not served
        return None
    return found["host"].strip("[]"), port, "tls" if is_tls else found["transport"] or "udp"


def _offered(message: Mapping[str, Any]) -> _Offered:
    try:
        return from_map(_Offered, message)
    except ProtocolError:
        return _Offered((), None)  # connections without a relay are better than none
