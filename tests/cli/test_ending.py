"""How a command ends that is told to, and one that cannot write."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from peerllm.cli import main as cli
from peerllm.cli.demo_processes import stage
from peerllm.cli.ending import ends_like_ctrl_c
from tests.cli.conftest import environment

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """What runs under nohup begins with a SIGHUP that is ignored, and its children too; the commands leave that so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", _ENDS)
def test_signals_interrupt_what_runs(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
@pytest.mark.parametrize("number", _ENDS)
def test_an_event_loop_ends_with_its_tasks_cleaned_up(number: signal.Signals, ctrl_c: signal.Handlers) -> None:
    ended: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleaned up")

    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c():
            uvloop.run(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["cleaned up"]


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_like_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("words", [("bench", "link"), ("doctor", "--wait", "--socket", "/nowhere/peerllm.sock")])
@pytest.mark.parametrize("number", _ENDS)
def test_keys_of_a_moment_are_gone_after_a_signal(
    number: signal.Signals, words: tuple[str, ...], tmp_path: Path
) -> None:
    with stage() as here:
        server = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
        url = server.wait_for(r"listening on (\S+)", 20)[1]
        with subprocess.Popen(
            [sys.executable, "-m", "peerllm.cli.main", *words, "--loopback", "--signaling", url],
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | {"TMPDIR": str(tmp_path)},
        ) as process:
            try:
                assert process.stdout is not None
                assert "Room code" in process.stdout.readline()
                assert list(tmp_path.glob("peerllm-*/identity.key"))
                process.send_signal(number)
                assert process.wait(20) == cli.EXIT_INTERRUPTED
            finally:
                process.kill()
    assert not list(tmp_path.glob("peerllm-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_line() -> None:
    begun = time.monotonic()
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "peerllm.cli.main", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
            check=False,
        )
    assert (result.returncode, result.stderr) == (1, "peerllm: cannot write: No space left on device\n")
    assert time.monotonic() - begun < 20


def test_a_command_whose_output_is_closed_runs_all_the_same(tmp_path: Path) -> None:
    """`peerllm rooms >&-`"""
    command = f"exec {sys.executable} -m peerllm rooms --state-dir {tmp_path} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
