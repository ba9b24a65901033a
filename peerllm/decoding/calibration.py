"""How often a candidate is right, by the probability that the draft gives it.

The two are not the same: a draft that agrees with the target on every token may give each of them 0.4. Counts in bins,
older ones weighing less, each bin leaning on the overall acceptance until it has seen something of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

_BINS = 10
_UNSEEN = 0.99
"""What a round leaves of a bin that it does not fill: one that was given up is tried again after some time."""


class Calibration:
    """Args: forget: weight that a count keeps with each later candidate of its bin."""

    def __init__(self, forget: float) -> None:
        self._forget = forget
        self._right = [0.0] * _BINS
        self._tried = [0.0] * _BINS

    def observe(self, probabilities: Sequence[float], accepted: int) -> None:
        """`accepted` candidates were right, the one after them was not, and nothing is known of the rest."""
        self._right = [count * _UNSEEN for count in self._right]
        self._tried = [count * _UNSEEN for count in self._tried]
        for index, probability in enumerate(probabilities[: accepted + 1]):
            place = min(_BINS - 1, max(0, int(probability * _BINS)))
            self._tried[place] = self._tried[place] * self._forget + 1
            self._right[place] = self._right[place] * self._forget + (index < accepted)

    def lowest_probability(self, acceptance: float, wanted: float) -> float:
        """The probability below which candidates are right less often than `wanted`, given the overall `acceptance`.

        0 if even the least likely are right often enough; at most the top bin's edge, so that sure ones pass.
        """
        for place in range(_BINS - 1, -1, -1):
            if (self._right[place] + acceptance) / (self._tried[place] + 1) < wanted:
                return min(place + 1, _BINS - 1) / _BINS
        return 0.0
