"""A daemon for the command line: the real API on a real socket, in a thread, with a backend that obeys the prompt."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from peerllm.api import serve
from peerllm.protocol.errors import ContextTooLong, PeerAway
from peerllm.protocol.requests import Event, Finished, GenerateRequest, ModelInfo, TextDelta, Usage
from peerllm.telemetry.ledger import RoundLedger

STATUS = {
    "release": "0.1.0",
    "state": "ready",
    "health": {"well": True, "cause": "ready"},
    "model": {"name": "tiny", "layers": 4, "codec": "exact", "dtype": "float32", "context": 64},
    "peers": [
        {"self": True, "layers": "0:2", "drafting": True},
        {"self": False, "id": "0123456789abcdef", "layers": [2, 4], "drafting": False},
    ],
    "link": {
        "state": "UP", "path": "direct", "rtt_ms": 83.21, "epoch": 2, "bytes_sent": 1_234_567, "bytes_received": 89,
        "retransmitted": 3,
    },
    "queue": {"waiting": 1, "active": 1},
    "worker": {"state": "ready", "beat_age_s": 0.25, "restarts": 0},
}  # fmt: skip


class Obedient:
    """What it answers is in the prompt: see `generate`."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.ended = threading.Event()

    def models(self) -> list[ModelInfo]:
        return [ModelInfo(name="tiny")]

    def health(self) -> tuple[bool, str]:
        return True, "ready"

    def status(self) -> dict[str, Any]:
        return STATUS

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.ended.clear()
        assert request.messages is not None
        prompt = request.messages[-1].content
        try:
            if prompt == "refuse":
                raise PeerAway("The other peer is away.")
            if len(request.messages) > 1 and prompt == "overflow":
                raise ContextTooLong("The conversation has 65 tokens; the context holds 64.")
            if prompt == "late":
                await asyncio.sleep(1.3)
            yield TextDelta(text=f"You said {prompt!r}" if prompt.isprintable() else prompt)
            if prompt == "break":
                raise PeerAway("The other peer is away.")
            while prompt == "endless":
                yield TextDelta(text=" and so on")
                await asyncio.sleep(0.001)
            if prompt == "hang":
                await asyncio.Event().wait()
            yield TextDelta(text=".")
            yield Finished(
                reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2), ledger=RoundLedger().summary()
            )
        finally:
            self.ended.set()


class Daemon:
    """Runs until `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = Obedient()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        async with await serve(self.backend, self.path, keepalive_seconds=0.2):
            self._ready.set()
            await self._over.wait()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "s")
    yield daemon
    daemon.stop()


def environment() -> dict[str, str]:
    """Of a user who has no runtime folder and no settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PEERLLM", "XDG"))}
    return kept | {"PYTHONWARNINGS": "error", "TERM": "xterm"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "peerllm.cli.main", *words]


class Peerllm:
    """`peerllm …` as a process, with `--socket` for the daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def words(self, *words: str) -> list[str]:
        return command(words[0], "--socket", str(self.path), *words[1:])

    def __call__(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*words), capture_output=True, text=True, timeout=20, check=False, env=environment(), **options
        )

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.words(*words), **(pipes | {"env": environment()} | options))


@pytest.fixture
def peerllm(tmp_path: Path) -> Peerllm:
    return Peerllm(tmp_path / "s")
