"""What the server's state machines know of a connection: somewhere to put messages, and whom to charge for them."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Line(Protocol):
    """One client's connection. Both methods return at once; nothing here waits for the network."""

    group: str
    """The address, or what counts as one address (`budgets.address_group`)."""

    def send(self, data: str | bytes) -> None:
        """Queues a message; a reader that lets too much pile up is dropped."""

    def drop(self, code: int, reason: str) -> None:
        """Sends what is queued and closes with a WebSocket close code."""


GOING_AWAY = 1001
POLICY = 1008
TRY_LATER = 1013
EVICTED = 4001


def say(line: Line, op: str, **fields: Any) -> None:
    line.send(json.dumps({"op": op, **fields}, separators=(",", ":")))


class Refused(Exception):
    """A request that is answered with an error; `ends` says whether the connection ends too."""

    def __init__(self, code: str, *, ends: bool = True) -> None:
        super().__init__(code)
        self.code = code
        self.ends = ends
