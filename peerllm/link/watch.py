"""Signs that the path may be gone before any silence shows it: addresses that changed, a machine that slept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

CHECK_SECONDS = 0.4
_JUMP_SECONDS = 1.0

log = structlog.get_logger(__name__)


class PathSigns:
    """Sans-I/O: what is seen goes in, a reason comes out when it differs from before."""

    def __init__(self, addresses: Iterable[str], slept: float) -> None:
        self._addresses = frozenset(addresses)
        self._slept = slept

    def look(self, addresses: Iterable[str], slept: float) -> str | None:
        """`slept` is the boot clock less the monotonic one, in seconds: it grows by what the machine slept."""
        seen = frozenset(addresses)
        changed, self._addresses = seen != self._addresses, seen
        jump, self._slept = slept - self._slept, slept
        if jump > _JUMP_SECONDS:
            return "slept"
        return "addresses" if changed else None


def seconds_slept() -> float:
    """0 where there is no boot clock: there the monotonic clock itself goes on in sleep, and silence tells."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


class Watch:
    """Looks every CHECK_SECONDS and calls `on_sign` with the reason."""

    def __init__(self, addresses: Callable[[], Iterable[str]], on_sign: Callable[[str], None]) -> None:
        self._addresses = addresses
        self._on_sign = on_sign
        self._signs = PathSigns(addresses(), seconds_slept())
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._look)
        try:
            sign = self._signs.look(self._addresses(), seconds_slept())
        except OSError as error:
            log.debug("watch.cannot_look", error=error.strerror)
            return
        if sign is not None:
            log.info("watch.sign", reason=sign)
            self._on_sign(sign)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
