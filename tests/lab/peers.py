"""Two links on two hosts of a lab, with the room between them in this process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from tests.lab.net import Lab

SECONDS = 60.0


class PeerFailed(Exception):
    """The peer answered with a typed error: `code` and words."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code


class LabPeer:
    """One end. `states` are (state, seconds of the monotonic clock, epoch), as they came."""

    def __init__(
        self, lab: Lab, host: str, name: str, options: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self.process: subprocess.Popen[str] = lab.start(
            *(host, sys.executable, "-m", "tests.lab.peer", name, json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.states: list[tuple[str, float, int]] = []
        self.has_room = True
        self.other: LabPeer | None = None
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def begin(self, other: LabPeer) -> None:
        self.other = other
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            message = json.loads(line)
            if "room" in message:
                if self.has_room and self.other is not None:
                    self.other.write(message)
            elif "state" in message:
                with self._changed:
                    self.states.append((message["state"], message["at"], message["epoch"]))
                    self._changed.notify_all()
            else:
                self._queue(message.get("done", "close")).put(message)

    def _queue(self, name: str) -> queue.Queue[dict[str, Any]]:
        return self._answers.setdefault(name, queue.Queue())

    def write(self, message: dict[str, Any]) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(json.dumps(message) + "\n")
                self.process.stdin.flush()
            except (BrokenPipeError, ValueError):
                return

    def do(self, name: str, **arguments: Any) -> None:
        """Begins a command of `peer._do`; `result` waits for it."""
        self.write({"do": name, **arguments})

    def result(self, name: str, seconds: float = SECONDS) -> Any:
        message = self._queue(name).get(timeout=seconds)
        if "error" in message:
            raise PeerFailed(message["error"], message["message"])
        return message.get("result", message)

    def ask(self, name: str, wait: float = SECONDS, **arguments: Any) -> Any:
        self.do(name, **arguments)
        return self.result(name, wait)

    def wait_state(self, state: str, *, epoch_above: int = -1, seconds: float = 30.0) -> float:
        """When the peer came to be in `state`, now or later."""
        until = time.monotonic() + seconds
        with self._changed:
            while not (self.states and self.states[-1][0] == state and self.states[-1][2] > epoch_above):
                if not self._changed.wait(timeout=max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"not {state} but {self.states[-3:]}")
            return self.states[-1][1]


class Peers:
    """`left`, on host a, controls; `right` is on host b. Both have `environment` beside this process's."""

    def __init__(
        self,
        lab: Lab,
        *,
        left: dict[str, Any] | None = None,
        right: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.left = LabPeer(lab, "a", "left", left or {}, environment)
        self.right = LabPeer(lab, "b", "right", right if right is not None else left or {}, environment)
        self.left.begin(self.right)
        self.right.begin(self.left)

    def start(self, seconds: float = 20.0) -> tuple[dict[str, Any], dict[str, Any]]:
        for each in (self.left, self.right):
            each.do("start")
        return self.left.result("start", seconds), self.right.result("start", seconds)

    def close(self) -> tuple[float, float]:
        """How long each close took."""
        for each in (self.left, self.right):
            each.write({"do": "close"})
        took = [each.result("close", 10.0)["closed_in"] for each in (self.left, self.right)]
        return took[0], took[1]
