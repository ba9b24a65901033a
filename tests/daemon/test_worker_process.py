"""Against a worker of the test's own that speaks the same frames: quick, and it misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peerllm.daemon.engine import Engine
from peerllm.daemon.worker_process import WorkerProcess
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, EngineError, PeerllmError, RoomIncomplete, WorkerDied, WorkerHung

SCRIPT = """
import argparse, os, socket, sys, threading, time
from peerllm.protocol.pipe import FrameReader, encode_frame
parser = argparse.ArgumentParser(); parser.add_argument("--fd", type=int)
pipe = socket.socket(fileno=parser.parse_args().fd)
lock = threading.Lock()
def send(header, payload=b""):
    with lock:
        for buffer in encode_frame(header, payload):
            pipe.sendall(buffer)
def beat():
    while True:
        send({"event": "beat"}); time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
reader = FrameReader()
while data := pipe.recv(65536):
    for header, payload in reader.feed(data):
        op, number = header["op"], header["id"]
        if op == "echo":
            send({"event": "progress", "stage": "echoing", "fraction": 0.5})
            send({"id": number, "ok": {"value": header["value"]}}, payload)
        elif op == "refuse":
            send({"id": number, "error": {"code": "invalid_request", "message": "no", "param": "x"}})
        elif op == "die":
            os._exit(3)
        elif op == "sleep":
            time.sleep(header["seconds"]); send({"id": number, "ok": {}})
        elif op == "load" and os.path.exists(header["folder"]):
            send({"id": number, "error": {"code": "engine_error", "message": "no memory", "param": None}})
        elif op == "load":
            send({"id": number, "ok": {"pid": os.getpid()}})
os._exit(0)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


@pytest.fixture
async def worker(command: list[str]) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(command=command, hung_seconds=1.0)
    await process.start()
    yield process
    await process.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_calls_are_answered_with_their_payload_and_in_order(worker: WorkerProcess) -> None:
    payload = os.urandom(1 << 20)
    replies = await asyncio.gather(*(worker.call("echo", payload, value=number) for number in range(5)))
    assert [reply.values["value"] for reply in replies] == list(range(5))
    assert all(reply.payload == payload for reply in replies)


async def test_what_the_worker_refuses_is_the_typed_error(worker: WorkerProcess) -> None:
    with pytest.raises(BadRequest, match="no") as caught:
        await worker.call("refuse")
    assert caught.value.param == "x"
    assert (await worker.call("echo", value=1)).values == {"value": 1}


async def test_a_worker_that_the_kernel_kills_names_the_likely_reason(worker: WorkerProcess) -> None:
    await worker.call("echo", value=1)
    waiting = asyncio.ensure_future(worker.call("sleep", seconds=30))
    await asyncio.sleep(0.1)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"\(signal SIGKILL, as when memory runs out\)"):
        await waiting


async def test_a_worker_that_dies_fails_every_call_that_waits(worker: WorkerProcess) -> None:
    results = await asyncio.gather(
        worker.call("sleep", seconds=0.1), worker.call("die"), worker.call("echo", value=1), return_exceptions=True
    )
    assert isinstance(results[1], WorkerDied)
    assert isinstance(results[2], WorkerDied)
    assert "exit status 3" in str(results[1])
    with pytest.raises(WorkerDied):
        await worker.call("echo", value=1)


async def test_a_worker_that_is_stopped_is_found_by_its_silence_and_killed(worker: WorkerProcess) -> None:
    assert worker.pid is not None
    await worker.call("echo", value=1)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="silent"):
        await worker.call("echo", value=2)


async def test_a_call_that_runs_past_its_deadline_ends_the_worker(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerHung, match="'sleep'"):
        await worker.call("sleep", seconds=60, deadline=0.2)
    with pytest.raises(WorkerHung):
        await worker.call("echo", value=1)


async def test_a_long_call_within_its_deadline_is_no_hang(worker: WorkerProcess) -> None:
    await worker.call("sleep", seconds=1.5, deadline=30)  # longer than the silence that is allowed: it beats meanwhile


async def test_the_worker_ends_when_it_is_closed(command: list[str]) -> None:
    worker = WorkerProcess(command=command)
    await worker.start()
    await worker.call("echo", value=1)
    assert worker.pid is not None
    await worker.close()
    assert not is_running(worker.pid)


async def test_progress_reaches_the_daemon(command: list[str]) -> None:
    seen: list[tuple[str, float]] = []
    worker = WorkerProcess(command=command, on_progress=lambda stage, fraction: seen.append((stage, fraction)))
    await worker.start()
    await worker.call("echo", value=1)
    await worker.close()
    assert seen == [("echoing", 0.5)]


class Lives:
    """An engine over workers of the test's own, and what it said of them."""

    def __init__(self, command: list[str]) -> None:
        self.lost: list[PeerllmError] = []
        self.restored = asyncio.Event()
        self.engine = Engine(
            on_progress=lambda stage, fraction: None,
            on_lost=self.lost.append,
            on_restored=self.restored.set,
            make_worker=lambda **options: WorkerProcess(command=command, **options),
        )

    async def die(self) -> None:
        with pytest.raises(WorkerDied):
            await self.engine.call("die")


@pytest.fixture
async def lives(command: list[str]) -> AsyncIterator[Lives]:
    lives = Lives(command)
    await lives.engine.start()
    yield lives
    await lives.engine.close()


async def test_after_a_death_a_successor_loads_the_same(lives: Lives, tmp_path: Path) -> None:
    engine = lives.engine
    first = (await engine.load(folder=str(tmp_path / "none")))["pid"]
    await lives.die()
    assert engine.state == "restarting"
    async with asyncio.timeout(30):
        await lives.restored.wait()
    assert [error.code for error in lives.lost] == ["worker_died"]
    assert engine.loaded is not None
    assert engine.loaded["pid"] != first
    assert engine.restarts == 1
    assert (await engine.call("echo", value=1)).values == {"value": 1}


async def test_whoever_waits_for_the_layers_gets_the_successor(lives: Lives, tmp_path: Path) -> None:
    with pytest.raises(RoomIncomplete):
        await lives.engine.until_loaded()
    first = (await lives.engine.load(folder=str(tmp_path / "none")))["pid"]
    await lives.die()
    async with asyncio.timeout(30):
        loaded = await lives.engine.until_loaded()
    assert loaded["pid"] != first


async def test_a_worker_that_is_being_restarted_is_not_loaded_twice(lives: Lives, tmp_path: Path) -> None:
    await lives.engine.load(folder=str(tmp_path / "none"))
    await lives.die()
    async with asyncio.timeout(30):
        again = await lives.engine.load(folder=str(tmp_path / "none"))
    assert again == lives.engine.loaded
    assert lives.engine.restarts == 1


async def test_after_a_load_that_failed_the_one_before_is_loaded_again(lives: Lives, tmp_path: Path) -> None:
    """The worker gives up what it holds before it loads."""
    good, bad = str(tmp_path / "none"), tmp_path / "taken"
    bad.touch()
    await lives.engine.load(folder=good)
    with pytest.raises(EngineError, match="no memory"):
        await lives.engine.load(folder=str(bad))
    assert lives.engine.loaded is None
    bad.unlink()
    assert (await lives.engine.load(folder=good))["pid"] > 0


async def test_whoever_waits_is_told_when_no_successor_loads_and_the_tries_go_on(lives: Lives, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    await lives.engine.load(folder=str(taken))
    taken.touch()
    await lives.die()
    with pytest.raises(EngineError, match="no memory"):
        async with asyncio.timeout(30):
            await lives.engine.until_loaded()
    assert lives.engine.restarts == limits.MAX_FAILED_RESTARTS
    taken.unlink()
    async with asyncio.timeout(30):
        await lives.restored.wait()
    assert await lives.engine.until_loaded()


async def test_closing_ends_the_waiting(lives: Lives, tmp_path: Path) -> None:
    await lives.engine.load(folder=str(tmp_path / "none"))
    await lives.die()
    waiting = asyncio.create_task(lives.engine.until_loaded())
    await asyncio.sleep(0)
    await lives.engine.close()
    with pytest.raises(WorkerDied, match="stopping"):
        await waiting
