"""A room across the lab's network, an answer that streams, and what is done to it meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerllm.cli.demo_processes import Child, Stage, stage
from tests.e2e.rooms import Daemon, kill, room_code, wait_ready, wait_until
from tests.lab.net import PUBLIC, Lab
from tests.lab.servers import start_signaling

LEVEL = "info"
TOKENS = 300
QUESTION = {"prompt": "the tide", "max_tokens": TOKENS, "temperature": 0}
_SIGNALING = f"ws://{PUBLIC}:8080"
_HOSTS = {"first": "a", "second": "b"}


@dataclass
class LabRoom:
    """Daemons on hosts a and b; the first drafts."""

    lab: Lab
    stage: Stage
    signaling: subprocess.Popen[Any]
    first: Daemon = field(init=False)
    second: Daemon = field(init=False)

    def start_daemon(self, name: str, *command: str) -> Daemon:
        path = self.stage.folder / f"{name}.sock"
        options = ("--signaling", _SIGNALING, "--insecure", "--threads", "1", "--device", "cpu", "--log-level", LEVEL)
        own = ("--state-dir", str(self.stage.folder / name), "--socket", str(path))
        lives = len(list(self.stage.folder.glob(f"{name}*.log")))
        argv = self.lab.argv(_HOSTS[name], sys.executable, "-m", "peerllm", *command, *options, *own)
        child = Child(f"{name}-{lives}", argv, self.stage.folder, {})
        self.stage.adopt(child)
        return Daemon(child, path)

    def restart_signaling(self) -> None:
        self.signaling = start_signaling(self.lab)


@contextmanager
def lab_room(model: Path, *, rtt_ms: float = 40.0) -> Iterator[LabRoom]:
    """Behind two port-preserving NATs, the signaling server on the public host."""
    with Lab(nat=("port-preserving", "port-preserving"), rtt_ms=rtt_ms) as lab, stage() as here:
        room = LabRoom(lab, here, start_signaling(lab))
        room.first = room.start_daemon("first", "up", "--model", str(model))
        room.second = room.start_daemon("second", "join", room_code(room.first), "--model", str(model))
        for daemon in (room.first, room.second):
            wait_ready(daemon)
        yield room


class Streaming:
    """An answer of TOKENS tokens, one token a round, read by a thread."""

    def __init__(self, daemon: Daemon) -> None:
        self.arrivals: list[float] = []
        """When each piece of text came (monotonic)."""
        self.text = ""
        self.tokens = 0
        self.failure: BaseException | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(daemon,), daemon=True)
        self._thread.start()
        if not self._has_begun.wait(60):
            raise AssertionError(f"no text came: {self.failure}")

    def _read(self, daemon: Daemon) -> None:
        body = {**QUESTION, "draft_length": 0, "stream_options": {"include_usage": True}}
        try:
            for event in daemon.client.stream("/v1/completions", body):
                self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
                if piece := "".join(choice["text"] for choice in event["choices"]):
                    self.text += piece
                    self.arrivals.append(time.monotonic())
                    if len(self.arrivals) == 10:
                        self._has_begun.set()
        except BaseException as error:
            self.failure = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def finish(self, seconds: float) -> str:
        self._thread.join(seconds)
        if self.failure is not None:
            raise self.failure
        if not self.is_over:
            raise AssertionError(f"after {len(self.arrivals)} pieces nothing came any more")
        return self.text

    def seconds_to_next(self, since: float) -> float:
        """From `since` to the next piece of text."""
        return next((arrival for arrival in self.arrivals if arrival > since), float("inf")) - since


Disturbance = Callable[[LabRoom], float]
"""Does something to a room, and gives the moment (monotonic) from which on the answer may be expected to go on."""


def cut(room: LabRoom, seconds: float) -> float:
    room.lab.cut("a")
    time.sleep(seconds)
    room.lab.restore("a")
    return time.monotonic()


def lose(room: LabRoom) -> float:
    for port in "ab":
        room.lab.shape(port, loss=0.3)
    time.sleep(10.0)
    for port in "ab":
        room.lab.shape(port, loss=0.0)
    return time.monotonic()


def change_address(room: LabRoom) -> float:
    room.lab.change_address("a", step=1)
    return time.monotonic()


def kill_signaling_while_cut(room: LabRoom) -> float:
    room.lab.cut("b")
    room.signaling.kill()
    time.sleep(4.0)
    room.restart_signaling()
    time.sleep(4.0)
    room.lab.restore("b")
    return time.monotonic()


def stop_verifying_daemon(room: LabRoom) -> float:
    kill(room.second.child.pid, signal.SIGSTOP)
    time.sleep(8.0)
    kill(room.second.child.pid, signal.SIGCONT)
    return time.monotonic()


def kill_verifying_daemon(room: LabRoom) -> float:
    kill(room.second.child.pid)
    room.second = room.start_daemon("second", "resume")
    wait_ready(room.second)
    return time.monotonic()


def kill_worker(room: LabRoom, name: str) -> float:
    daemon: Daemon = getattr(room, name)
    pid = daemon.worker_pid()
    kill(pid)

    def is_replaced() -> bool:
        worker = daemon.status()["worker"]
        return worker["state"] == "ready" and worker["pid"] != pid

    wait_until(is_replaced, 60)
    return time.monotonic()


DISTURBANCES: dict[str, tuple[str, Disturbance]] = {
    "cut for 2 s": ("second", lambda room: cut(room, 2.0)),
    "cut for 20 s": ("second", lambda room: cut(room, 20.0)),
    "30% loss for 10 s": ("second", lose),
    "address changed": ("second", change_address),
    "signaling server killed and restarted while cut": ("second", kill_signaling_while_cut),
    "verifying daemon stopped for 8 s": ("first", stop_verifying_daemon),
    "verifying daemon killed and started again": ("first", kill_verifying_daemon),
    "drafting peer's worker killed": ("second", lambda room: kill_worker(room, "first")),
    "verifying peer's worker killed": ("second", lambda room: kill_worker(room, "second")),
}
"""Whose user asks, and what happens. The second's answers cross the link, and may get lost with it."""
