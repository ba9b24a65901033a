"""How far to draft. A candidate costs time whether it is right or not; a round costs a round trip whatever its length.

With a chance a that a candidate is right, K candidates give (1 - a^(K+1)) / (1 - a) tokens a round (Leviathan et al.,
2023, equation 1), and a round takes t0 + K t1. Both are measured as rounds go by, and K is what gives the most tokens a
second; where no K beats 0 by more than the noise, plain decoding it is, with a cheap probe now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peerllm.decoding.calibration import Calibration


class DraftLengthPolicy(Protocol):
    def choose(self) -> tuple[int, float]:
        """(most candidates, probability below which the drafter stops) for the next block."""
        ...

    def observe(self, probabilities: Sequence[float], accepted: int, seconds: float | None) -> None:
        """A round: `accepted` candidates were right, of those to which the draft gave these `probabilities`.

        `seconds` None: its time says nothing of later rounds (an answer's first has the draft's prefill in it).
        """
        ...


@dataclass
class FixedDraftLength:
    """K as the user set it."""

    length: int

    def choose(self) -> tuple[int, float]:
        return self.length, 0.0

    def observe(self, probabilities: Sequence[float], accepted: int, seconds: float | None) -> None:
        pass


class AdaptiveDraftLength:
    """K that gives the most tokens a second, from what the last rounds took and gave."""

    FIRST_LENGTH = 4
    FORGET = 0.94
    """Weight that a round keeps with each later one: about 16 rounds are remembered."""
    MARGIN = 1.03
    """What K > 0 has to promise over plain decoding, so that noise does not choose it."""
    PROBE_COST = 0.03
    """What probes of one candidate may cost at first, as a share of the plain rounds between them; each that finds
    nothing doubles the wait. All of them stay under the 5 percent that speculation may lose on the worst text."""
    FIRST_PROBE, LAST_PROBE = 4, 256
    """Plain rounds before a probe: at least, at most."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._right = 1.5
        self._tried = 2.0  # a prior worth two trials: 0.75, so that the first rounds draft
        self._fit = _LineFit(self.FORGET)
        self._calibration = Calibration(self.FORGET)
        self._tokens = self._seconds = 0.0
        self._plain_rounds = 0
        self._failed_probes = 0

    @property
    def acceptance(self) -> float:
        """The chance that a candidate is right, given that those before it were."""
        return min(0.995, self._right / self._tried)

    def choose(self) -> tuple[int, float]:
        if not self._fit.is_known:
            # Two block lengths are needed before a round's cost has a slope.
            return min(self.FIRST_LENGTH if self._fit.count != 1 else self.FIRST_LENGTH // 2, self._max_length), 0.0
        base, slope = self._fit.line()
        best, best_rate = 0, self.MARGIN / base
        tokens, chance = 1.0, 1.0
        for length in range(1, self._max_length + 1):
            chance *= self.acceptance
            tokens += chance
            rate = tokens / (base + length * slope)
            if rate > best_rate:
                best, best_rate = length, rate
        if best == 0:
            self._plain_rounds += 1
            wait = slope / base / self.PROBE_COST * 2**self._failed_probes
            if self._plain_rounds >= min(max(wait, self.FIRST_PROBE), self.LAST_PROBE):
                self._plain_rounds = 0
                self._failed_probes += 1
                return min(1, self._max_length), 0.0
            return 0, 0.0
        self._plain_rounds = self._failed_probes = 0
        # A candidate less likely than this costs more time than the tokens it may give, at the rate that is really
        # reached: the rate that K promises counts only candidates that passed this very bar.
        worth = slope * self._tokens / self._seconds
        return best, self._calibration.lowest_probability(self.acceptance, worth)

    def observe(self, probabilities: Sequence[float], accepted: int, seconds: float | None) -> None:
        drafted = len(probabilities)
        if drafted:
            self._calibration.observe(probabilities, accepted)
            self._right = self._right * self.FORGET + accepted
            self._tried = self._tried * self.FORGET + min(drafted, accepted + 1)
        if seconds is not None:
            self._fit.add(drafted, seconds)
            self._tokens = self._tokens * self.FORGET + accepted + 1
            self._seconds = self._seconds * self.FORGET + seconds


class _LineFit:
    """Least squares for seconds = base + slope * candidates, older rounds weighing less."""

    ALIKE = 0.05
    """Variance of the block lengths below which they say nothing of the slope; the last known one stays."""

    def __init__(self, forget: float) -> None:
        self._forget = forget
        self._slope: float | None = None
        self.count = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = self._forget
        self.count += 1
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread >= self.ALIKE:
            self._slope = max((self._xy / self._n - mean_x * mean_y) / spread, 0.002 * mean_y)

    @property
    def is_known(self) -> bool:
        return self.count >= 2

    def line(self) -> tuple[float, float]:
        """(seconds of a round without candidates, seconds more for each): both positive."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        slope = 0.05 * mean_y if self._slope is None else self._slope
        return max(mean_y - slope * mean_x, 0.2 * mean_y), slope
