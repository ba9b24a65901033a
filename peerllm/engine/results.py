"""What the engine's operations give back. Times are whole microseconds, for the round's ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`payload`: encoded hidden states of the rows, empty from the last slice."""

    payload: bytes
    decode_us: int
    layers_us: int
    encode_us: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """`payload`: encoded hidden states of rows `[start, start + len(candidates)]`."""

    start: int
    candidates: list[int]
    probabilities: list[float]
    payload: bytes
    draft_us: int
    layers_us: int
    encode_us: int


@dataclass(frozen=True, slots=True)
class Verified:
    """`accepted` candidates were right; `next_token` is the target's token after them."""

    accepted: int
    next_token: int
    decode_us: int
    layers_us: int
    verdict_us: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is ready after loading."""

    context: int
    vocabulary: int
    width: int
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


class Stopwatch:
    """Microseconds since it was made or last read."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap_us(self) -> int:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return round(elapsed * 1e6)
