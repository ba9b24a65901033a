"""How much may be in flight, and how fast it leaves: a window that follows the path's delay.

The window obeys FAST TCP's rule (Wei, Jin, Low, Hegde 2006): once a round trip `w <- w * base / rtt + alpha`, so that
each flow keeps about `alpha` in the bottleneck's queue, whatever its buffer holds, and flows over one bottleneck share
it.
It starts from a measurement instead of a guess: the spacing in which a train's SACKs come back is the bottleneck's rate
(packet trains, Jain and Routhier 1986), so the second round trip already has the right window. Only loss beyond what
a radio link has by chance shrinks it; a round trip without a SACK begins anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from peerllm.protocol import limits

PACKET = 1_200
"""For the arithmetic; packets are about so large."""
_LUMP_SECONDS = 0.002
"""SACKs come in lumps: a radio link sends many packets in one of its frames, and a busy machine wakes late. What comes
within so long of a lump's first is of that lump."""
_TRAIN_BYTES = 5 * PACKET
"""A rate is judged over at least so much of a train."""
_LONG_SHARE = 1 / 3
"""Of a flight. What a late lump adds or hides is little beside so long a train, and a multiple of a short one."""
_STRETCHED = 1.25
"""A train that took so much longer to arrive than to leave was faster than the bottleneck, and shows its rate."""
_PAUSE_SECONDS = 0.005
"""Packets sent further apart are not of one train."""
_NOISE_SECONDS = 0.008
"""A round trip that is longer by less than this has met no queue worth the name."""
_ALPHA_PACKETS = 6
_ALPHA_SHARE = 1 / 32
_LOSS_RATIO = 0.04
_LOSS_PACKETS = 5
"""A round trip that lost less lost it by chance: radio, reordering."""
_GROWTH = 1.5
_JUMP = 10.0
"""How far one round trip's train is trusted."""
_BLIND_JUMP = 6.0
"""How far when all of it came at once, so that it told no rate."""
_BASE_SECONDS = 10.0
_DRAIN_SECONDS = 4.0
"""A window in use is halved for a round trip so often, so that both flows over a bottleneck see its true base."""
_PACING_GAIN = 1.5


@dataclass(slots=True)
class _Lump:
    """SACKs that came together. `before` and `after` are bytes delivered so far; `sent_at` is the newest's."""

    begun: float
    ended: float
    before: int
    after: int
    sent_at: float

    @property
    def size(self) -> int:
        return self.after - self.before


class Window:
    """All in bytes and seconds. `size` bounds what is in flight, `rate` how fast it leaves."""

    def __init__(self) -> None:
        self.size = float(limits.SCTP_INITIAL_PACKETS * PACKET)
        self.base: float | None = None
        self.smoothed: float | None = None
        self.variation = 0.0
        self.train_rate = 0.0
        self._bases: deque[tuple[float, float]] = deque()
        self._is_starting = True
        self._round_begun: float | None = None
        """A round trip is over when something that was sent in it is acknowledged."""
        self._round_rtt: float | None = None
        self._sent_size = self.size
        """The window of the round trip before: what is acknowledged now was sent under it."""
        self._round_delivered = 0
        self._round_lost = 0
        self._was_limited = False
        self._is_measured = False
        """A long train came back in this round trip."""
        self._train: deque[_Lump] = deque()
        self._train_flight = 0
        """What was in flight when the train began to come back."""
        self._train_sent_at = 0.0
        self._delivered = 0
        self._before_loss: tuple[float, bool] | None = None
        self._recover_to = 0.0
        self._drain_at: float | None = None
        self._undrained: float | None = None

    @property
    def rate(self) -> float | None:
        """Bytes a second; None: no train was measured yet, and the window alone bounds what leaves."""
        return _PACING_GAIN * self.train_rate if self.train_rate else None

    def limited(self) -> None:
        """The window held something back: only then does it have a reason to grow."""
        self._was_limited = True

    def sampled(self, rtt: float, now: float) -> None:
        """A round trip of a chunk that was sent once."""
        if self.smoothed is None:
            self.smoothed, self.variation = rtt, rtt / 2
        else:
            self.variation += (abs(self.smoothed - rtt) - self.variation) / 4
            self.smoothed += (rtt - self.smoothed) / 8
        if self._round_rtt is None or rtt < self._round_rtt:
            self._round_rtt = rtt
        while self._bases and self._bases[-1][1] >= rtt:
            self._bases.pop()
        self._bases.append((now, rtt))
        while self._bases[0][0] < now - _BASE_SECONDS:
            self._bases.popleft()
        self.base = self._bases[0][1]

    def delivered(self, size: int, sent_at: float, flight: int, now: float) -> None:
        """A SACK said that `size` more bytes of the `flight` have arrived, the newest of them sent at `sent_at`."""
        self._delivered += size
        self._round_delivered += size
        self._measure_train(size, sent_at, flight, now)
        if self._is_starting and self._was_limited and self.base is not None:
            self._start(self.base)
        if self._round_begun is None:
            self._round_begun = now
        elif sent_at >= self._round_begun:
            self._end_round(now)

    def _start(self, base: float) -> None:
        """The train tells at once what doubling would find out in several round trips, without its overshoot. Until
        this round trip's has told, the one before is trusted as far as doubling has gone by now."""
        doubling = self._sent_size + self._round_delivered
        if self._is_measured:
            size = min(self.train_rate * base, _JUMP * self._sent_size)
        elif self.train_rate:
            size = min(self.train_rate * base, doubling)
        elif len(self._train) == 1 and self._train[0].size >= max(self._sent_size / 2, _TRAIN_BYTES):
            size = _BLIND_JUMP * self._sent_size  # half a flight in one lump: too fast to be told yet
        else:
            size = doubling
        self._set(max(self.size, size))

    def _measure_train(self, size: int, sent_at: float, flight: int, now: float) -> None:
        train = self._train
        pause = _PAUSE_SECONDS if not self.train_rate else max(_PAUSE_SECONDS, 3 * PACKET / self.train_rate)
        is_new = sent_at - self._train_sent_at > pause
        self._train_sent_at = max(self._train_sent_at, sent_at)
        if train and not is_new and now - train[-1].begun < _LUMP_SECONDS:
            lump = train[-1]
            lump.ended, lump.after, lump.sent_at = now, self._delivered, self._train_sent_at
        else:
            self._judge_train(is_whole=True)
            if is_new:
                train.clear()  # what came back before was another train: the pause between is ours, not the path's
            elif self.base is not None:
                while len(train) > 2 and train[1].ended < now - max(self.base, 4 * _LUMP_SECONDS):
                    train.popleft()
            if not train:
                self._train_flight = flight
            train.append(_Lump(now, now, self._delivered - size, self._delivered, self._train_sent_at))
        self._judge_train(is_whole=False)

    def _judge_train(self, *, is_whole: bool) -> None:
        """From the end of the first lump, which may have been late, so that nothing of it is counted. Until the last
        one is whole, the train says only what the rate is at least."""
        if len(self._train) < 2:
            return
        first, last = self._train[0], self._train[-1]
        passed, span, sent_span = last.after - first.after, last.ended - first.ended, last.sent_at - first.sent_at
        if passed < _TRAIN_BYTES:
            return
        rate = passed / max(span, sent_span, _LUMP_SECONDS)  # no faster than it was sent
        is_long = passed >= _LONG_SHARE * self._train_flight or span >= (self.base or 0.0) / 2
        self._is_measured |= is_long
        if rate > self.train_rate:
            # The first is better than none: what a short train tells is corrected by the next long one. The last SACK
            # of a flight may be one that the other side held back, which would tell a fraction of the rate.
            if is_long or not self.train_rate:
                self.train_rate = rate
        elif is_whole and is_long and span > _STRETCHED * sent_span:
            self.train_rate += (rate - self.train_rate) / 8
        elif is_whole:
            # Slowly: a train that was held back by us or by the application says too little.
            self.train_rate += (rate - self.train_rate) / 64

    def _end_round(self, now: float) -> None:
        rtt, base = self._round_rtt, self.base
        if rtt is None or base is None:
            return
        lost, delivered, was_limited = self._round_lost, self._round_delivered, self._was_limited
        sent_size, self._sent_size = self._sent_size, self.size
        self._is_measured = False
        self._round_begun = now
        self._round_rtt = None
        self._round_delivered = self._round_lost = 0
        self._was_limited = False
        if self._undrained is not None:
            self._sent_size = self.size = self._undrained
            self._undrained = None
            return
        if lost >= _LOSS_PACKETS * PACKET and lost > _LOSS_RATIO * (lost + delivered):
            self._before_loss = self.size, self._is_starting
            self._recover_to = 0.85 * self.size
            self._is_starting = False
            self._set(min(self.size, max(delivered, self.size / 2)) * 0.85)
            return
        queueing = max(0.0, rtt - base - _NOISE_SECONDS)
        alpha = _ALPHA_PACKETS * PACKET + self.size * _ALPHA_SHARE
        # The queue that was seen is that of the window before. Were the present one, which may be smaller for that very
        # queue, made smaller for it again, the path would run empty; what it has grown by since is in the queue too.
        target = alpha + (min(self.size, sent_size * base / (base + queueing)) if queueing else self.size)
        queued = queueing * sent_size / base
        if queued > alpha:
            self._is_starting = False
        elif was_limited and queued < alpha and self.size < self._recover_to:
            target = max(target, min(_GROWTH * self.size, self._recover_to))  # given up for a loss, and no queue to see
        if queued > alpha:
            self._recover_to = 0.0
        if target < self.size or was_limited:
            self._set(target)
        self._maybe_drain(was_limited, now)

    def _maybe_drain(self, was_limited: bool, now: float) -> None:
        if not was_limited or self._is_starting:
            self._drain_at = None
        elif self._drain_at is None:
            self._drain_at = now + _DRAIN_SECONDS
        elif now >= self._drain_at:
            self._drain_at = now + _DRAIN_SECONDS
            self._undrained = self.size
            self.size = max(self.size / 2, limits.SCTP_MIN_PACKETS * PACKET)

    def lost(self, size: int) -> None:
        self._round_lost += size

    def was_spurious(self) -> None:
        """What was taken for lost had arrived: a window that shrank for it is given back (RFC 4015's purpose)."""
        self._round_lost = 0
        if self._before_loss is not None:
            size, self._is_starting = self._before_loss
            self._before_loss = None
            self._set(max(self.size, size))

    def timed_out(self) -> None:
        """T3: nothing at all came back."""
        self._undrained = self._before_loss = None
        self._recover_to = 0.0
        self._is_starting = True
        self.train_rate = 0.0
        self._train.clear()
        self._is_measured = False
        self._round_delivered = 0
        self._set(limits.SCTP_MIN_PACKETS * PACKET)
        self._sent_size = self.size

    def _set(self, size: float) -> None:
        self.size = min(max(size, limits.SCTP_MIN_PACKETS * PACKET), limits.SCTP_MAX_WINDOW_BYTES)
