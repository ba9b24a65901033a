"""Whole rooms for tests: a signaling server and two daemons, each a process of its own, over a real data channel."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerllm.cli.client import Client
from peerllm.cli.demo_processes import Child, Stage, stage

READY = r"Ready: \S+, layers (\S+) of (\d+) here"
START_SECONDS = 90.0


@dataclass
class Daemon:
    """One daemon and its socket."""

    child: Child
    socket: Path

    @property
    def client(self) -> Client:
        return Client(self.socket)

    def status(self) -> dict[str, Any]:
        return self.client.get("/status")

    def worker_pid(self) -> int:
        pid: int = self.status()["worker"]["pid"]
        return pid

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """A whole answer: text, tokens, reason, ledger."""
        text, usage, reason, ledger = "", {}, None, {}
        body = {"prompt": prompt, "temperature": 0, "stream_options": {"include_usage": True}, **options}
        for event in self.client.stream("/v1/completions", body):
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
            usage = event.get("usage") or usage
            ledger = event.get("ledger") or ledger
        return {
            "text": text,
            "tokens": usage["completion_tokens"],
            "prompt_tokens": usage["prompt_tokens"],
            "reason": reason,
            "ledger": ledger,
        }

    def post(self, target: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(status, JSON) of a request that does not stream."""
        payload = json.dumps(body).encode()
        head = (
            f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(os.fspath(self.socket))
            connection.sendall(head.encode() + payload)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        header, _, content = answer.partition(b"\r\n\r\n")
        status = int(header.split()[1])
        return status, json.loads(content)

    def is_well(self) -> bool:
        return bool(self.status()["health"]["well"])

    def wait_well(self, seconds: float = 60.0) -> None:
        wait_until(self.is_well, seconds, lambda: f"{self.status()['health']}\n{self.child.log_tail()}")


@dataclass
class RoomOfTwo:
    stage: Stage
    signaling: str
    first: Daemon
    second: Daemon


def with_word(word: str, pids: Iterable[int]) -> list[int]:
    """Those of the processes whose command line has that word."""
    return [pid for pid in pids if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def wait_until(condition: Any, seconds: float, why: Any = lambda: "") -> None:
    """Polls: processes have no event for what is waited for here."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {why()}")
        time.sleep(0.05)


def start_signaling(here: Stage) -> str:
    child = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
    return f"ws://127.0.0.1:{child.wait_for(r'127.0.0.1:([0-9]+)', START_SECONDS)[1]}"


def start_daemon(here: Stage, name: str, signaling: str, *command: str, env: Mapping[str, str] | None = None) -> Daemon:
    path = here.folder / f"{name}.sock"
    lives = len(list(here.folder.glob(f"{name}*.log")))
    child = here.start(
        f"{name}-{lives}" if lives else name,
        "peerllm",
        *command,
        *("--signaling", signaling, "--loopback", "--threads", "1", "--device", "cpu", "--log-level", "info"),
        *("--state-dir", str(here.folder / name), "--socket", str(path)),
        env=env,
    )
    return Daemon(child, path)


def room_code(daemon: Daemon) -> str:
    return daemon.child.wait_for(r"Room code: (\S+)", START_SECONDS)[1]


def wait_ready(daemon: Daemon) -> re.Match[str]:
    return daemon.child.wait_for(READY, START_SECONDS)


@contextmanager
def room_of_two(
    model: str, *, up: tuple[str, ...] = (), join: tuple[str, ...] = (), rtt: float = 0.0
) -> Iterator[RoomOfTwo]:
    """Both daemons ready, `up` and `join` being further options of theirs."""
    with stage() as here:
        signaling = start_signaling(here)
        link = ("--rtt", str(rtt))
        first = start_daemon(here, "first", signaling, "up", "--model", model, *link, *up)
        second = start_daemon(here, "second", signaling, "join", room_code(first), "--model", model, *link, *join)
        for daemon in (first, second):
            wait_ready(daemon)
        yield RoomOfTwo(here, signaling, first, second)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
