"""How long a step may take before something is wrong: a floor, or many times what it usually takes."""

from __future__ import annotations

import statistics
from collections import deque

from peerllm.protocol import limits

_REMEMBERED = 64


class StepDeadline:
    """The larger of `floor` seconds and ROUND_DEADLINE_FACTOR times the median of the last steps."""

    def __init__(self, floor: float = limits.ROUND_DEADLINE_SECONDS) -> None:
        self._floor = floor
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def took(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(self._floor, limits.ROUND_DEADLINE_FACTOR * usual)
