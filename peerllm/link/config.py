"""What a user of a link sets and sees."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from peerllm.protocol import limits


class Urgency(enum.IntEnum):
    """Which message goes first; order holds within an urgency, not between two."""

    CONTROL = 0
    """Pings, HELLO, credits: the link's own."""
    ROUND = 1
    """Blocks and verdicts."""
    ANSWER = 2
    """Text to a user of the other peer."""
    BULK = 3
    """Prefill."""


class LinkState(enum.Enum):
    SIGNALING = "signaling"
    ICE = "ice"
    HELLO = "hello"
    UP = "up"
    SUSPECT = "suspect"
    """Nothing was heard for a while; replacements are being made beside the old connection."""
    DOWN = "down"
    """For good: closed, or no connection came within `LinkConfig.kept_seconds`."""


@dataclass(frozen=True, slots=True)
class TurnServer:
    """A relay. `transport` is udp, tcp or tls."""

    host: str
    port: int
    username: str
    credential: str = field(repr=False)
    transport: str = "udp"


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """
    Args:
        loopback: 127.0.0.1 is the only host candidate, and loopback addresses of the peer are accepted. For the demo
            and the tests.
        added_rtt_ms: so much is added to the round trip in user space, below SCTP, half of it by each side.
        stun: (host, port) of STUN servers, all of which are asked. None by default.
        turn: relays, all of which are tried.
        kept_seconds: how long the link looks for a new connection after it lost one.
        relay_only, direct_only: only this kind of path is tried.
        direct_retry_seconds: a relayed link looks for a direct path after so long, and twice as long each time.
        own_sctp: our loss recovery and pacing instead of aiortc's.
    """

    loopback: bool = False
    added_rtt_ms: float = 0.0
    stun: tuple[tuple[str, int], ...] = ()
    turn: tuple[TurnServer, ...] = ()
    kept_seconds: float = limits.SESSION_KEPT_SECONDS
    relay_only: bool = False
    direct_only: bool = False
    direct_retry_seconds: float = limits.DIRECT_RETRY_SECONDS
    own_sctp: bool = True


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters are of the present connection; `path` is direct, relayed or loopback, and None while there is none."""

    state: LinkState
    epoch: int
    path: str | None = None
    rtt_ms: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    retransmitted: int = 0
