"""Where a round's time goes: one ledger for each answer, and one for all of a daemon's that takes them in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from peerllm.protocol import limits

PARTS = ("draft", "own_layers", "encode", "network", "their_layers", "verdict", "total")
"""What a round's time is made of. `network` is from the block's departure to the verdict's arrival, less what the other
side says it took; `total` is the whole round, with what none of the others has."""


class RoundLedger:
    """Counts for ever, times of the last `limits.MAX_LEDGER_ROUNDS` rounds.

    Args:
        started: when the request's turn came, by `clock`; now unless given.
        clock: seconds.
    """

    def __init__(self, *, started: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock() if started is None else started
        self.rounds = 0
        self.tokens = 0
        self.drafted = 0
        self.accepted = 0
        self._times: deque[tuple[float, ...]] = deque(maxlen=limits.MAX_LEDGER_ROUNDS)
        self._first_tokens: deque[float] = deque(maxlen=limits.MAX_LEDGER_ROUNDS)
        self._later_tokens = 0
        self._later_seconds = 0.0

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        tokens: int,
        draft: float = 0.0,
        own_layers: float = 0.0,
        encode: float = 0.0,
        network: float = 0.0,
        their_layers: float = 0.0,
        verdict: float = 0.0,
        total: float = 0.0,
    ) -> None:
        """A verdict has come, just now. Times are seconds.

        Args:
            drafted: candidates in the block.
            accepted: how many of them were right.
            tokens: how many tokens the answer grew by: less than accepted + 1 where a stop or a limit cut it.
        """
        since_start = self._clock() - self._started
        self.rounds += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self._times.append((draft, own_layers, encode, network, their_layers, verdict, total))
        if self.rounds == 1:
            self._first_tokens.append(since_start)
        else:
            self._later_tokens += tokens
            self._later_seconds = since_start - self._first_tokens[0]

    def include(self, other: RoundLedger) -> None:
        """Takes in the ledger of an answer that is complete. The time between answers counts nowhere."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted += other.accepted
        self._times.extend(other._times)
        self._first_tokens.extend(other._first_tokens)
        self._later_tokens += other._later_tokens
        self._later_seconds += other._later_seconds

    def summary(self) -> dict[str, Any]:
        """Plain JSON values.

        `tokens_per_second` is the decoding speed: the tokens after the first round's, over the time since that round;
        None before the second. `acceptance_rate` is accepted over drafted candidates; None where nothing was drafted.
        `tokens_per_round` is the mean; `time_to_first_token_ms` and `medians_ms` (by `PARTS`) are medians.
        """
        columns = list(zip(*self._times, strict=True)) or [()] * len(PARTS)
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tokens_per_second": _ratio(self._later_tokens, self._later_seconds),
            "acceptance_rate": _ratio(self.accepted, self.drafted),
            "tokens_per_round": _ratio(self.tokens, self.rounds),
            "time_to_first_token_ms": _median_ms(self._first_tokens),
            "medians_ms": {part: _median_ms(column) for part, column in zip(PARTS, columns, strict=True)},
        }


def _ratio(over: float, under: float) -> float | None:
    return round(over / under, 4) if under > 0 else None


def _median_ms(seconds: Iterable[float]) -> float | None:
    values = list(seconds)
    return round(median(values) * 1000, 3) if values else None
