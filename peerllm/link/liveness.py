"""Is the other side still there? Sans-I/O: time comes in, a verdict goes out."""

from __future__ import annotations

import enum

from peerllm.protocol import limits

TICK_SECONDS = 0.25
"""How often `judge` wants to be asked."""
_LATE_SECONDS = 1.0


class Life(enum.Enum):
    WELL = "well"
    SUSPECT = "suspect"
    DOWN = "down"


class Liveness:
    """Silence of SUSPECT_SECONDS is suspect, of DOWN_SECONDS is the end of a connection; any frame counts.

    After this process was stopped itself (SIGSTOP, suspend, a debugger) what came meanwhile still lies in the socket:
    a judge who asks late first gives the loop time to read it.
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        self._judged = now
        self._ping_due = now
        self._is_forced = False

    def heard(self, now: float) -> None:
        self._heard = now
        self._is_forced = False

    def suspect(self) -> None:
        """Something else says that the path may be gone: an address changed, the machine slept. A frame ends it."""
        self._is_forced = True

    def judge(self, now: float) -> Life:
        """Asked every TICK_SECONDS."""
        if now - self._judged > TICK_SECONDS + _LATE_SECONDS:
            # Nothing was read meanwhile, so nothing can be said yet; the rest of a second is for the backlog.
            self._heard = max(self._heard, now - limits.SUSPECT_SECONDS + 1.0)
        self._judged = now
        silence = now - self._heard
        if silence >= limits.DOWN_SECONDS:
            return Life.DOWN
        if self._is_forced or silence >= limits.SUSPECT_SECONDS:
            return Life.SUSPECT
        return Life.WELL

    def is_ping_due(self, now: float) -> bool:
        """True once every PING_SECONDS; asking counts as sending."""
        if now < self._ping_due:
            return False
        self._ping_due = now + limits.PING_SECONDS
        return True
