"""What a daemon is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """`model` None: learned from the room (a joiner). `room_code` and `resume` None: open a room."""

    signaling: str
    state_dir: Path
    socket: Path
    room_code: str | None = None
    resume: str | None = None
    """The lasting name of a room to meet again in; empty: the one met last."""
    model: str | None = None
    revision: str | None = None
    draft: str = "auto"
    """`none`, `ngram`, `model:PATH`, or `auto`: the model's in this package, and `ngram` where there is none."""
    draft_length: int | None = None
    """Candidates a block for every request that does not say; None adapts."""
    layers: LayerRange | None = None
    codec: str = "exact"
    dtype: str | None = None
    context: int | None = None
    weights: str | None = None
    """As what this peer runs its layers' weights: `int8`, or as they come (`auto`, and where nothing is said)."""
    devices: tuple[str, ...] = ()
    """Which share this peer's layers; none named: the machine's first."""
    draft_device: str | None = None
    threads: int | None = None
    socket_group: str | None = None
    is_download_allowed: bool = False
    is_insecure: bool = False
    is_loopback: bool = False
    added_rtt_ms: float = 0.0
    kept_seconds: float = limits.SESSION_KEPT_SECONDS
    """How long answers wait for a peer that is silent."""
