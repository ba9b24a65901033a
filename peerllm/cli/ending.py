"""How commands that leave something to clean up come to their end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP, which would end the process where it stands, do what Ctrl-C does. One that is ignored, as
    `nohup` has it, stays so."""

    def interrupt(number: int, frame: object) -> None:
        # Within an event loop Ctrl-C is the loop's: it ends the task that runs. A shell's background job ignores it.
        ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(ctrl_c):
            ctrl_c(signal.SIGINT, None)
        else:
            raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in _ENDS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
