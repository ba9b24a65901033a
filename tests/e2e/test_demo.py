"""`peerllm demo` as a newcomer runs it, on a tiny model: what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peerllm.cli.client import Client
from tests.e2e.rooms import wait_until, with_word

DEMO = [sys.executable, "-m", "peerllm", "demo"]


@dataclass
class Trace:
    """By which a demo's processes and files are told from everybody else's."""

    folder: Path
    mark: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.folder), "PEERLLM_TEST_MARK": self.mark, "PYTHONUNBUFFERED": "1"}

    def processes(self) -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if self.mark.encode() in environment and state != "Z":
                    found.add(int(entry.name))
        return found

    def files(self) -> set[str]:
        return {entry.name for entry in self.folder.glob("peerllm-demo-*")}


@pytest.fixture
def trace() -> Iterator[Trace]:
    with tempfile.TemporaryDirectory(prefix="pd", dir="/tmp") as folder:
        yield Trace(Path(folder), secrets.token_hex(8))


def test_it_prints_the_figures_as_json_and_leaves_nothing_behind(tiny_model: Path, trace: Trace) -> None:
    result = subprocess.run(
        [*DEMO, "--model", str(tiny_model), "--json", "--rtt", "20", "--max-tokens", "24", "--prompt", "the tide"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=trace.environment,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["identical"] is True
    assert figures["rtt_ms"] == 20
    assert figures["plain"]["tokens_per_second"] > 0
    assert figures["plain"]["medians_ms"]["network"] > 19
    assert figures["speculative"]["tokens_per_round"] >= 1
    assert set(figures["speculative"]) >= {"tokens_per_second", "acceptance_rate", "tokens_per_round"}
    assert "\x1b" not in result.stdout + result.stderr
    assert trace.files() == set()
    wait_until(lambda: not trace.processes(), 3, trace.processes)


def test_both_daemons_hold_their_layers_in_int8_where_that_is_asked_for(tiny_model: Path, trace: Trace) -> None:
    command = [*DEMO, "--model", str(tiny_model), "--weights", "int8", "--max-tokens", "12", "--prompt", "the tide"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, env=trace.environment)
    assert demo.stdout is not None
    seen = b""
    while b"Asking the first" not in seen:
        data = os.read(demo.stdout.fileno(), 4096)
        assert data, seen.decode()
        seen += data
    demo.send_signal(signal.SIGSTOP)
    try:
        (folder,) = trace.folder.glob("peerllm-demo-*")
        held = [peer["weights"] for peer in Client(folder / "second.sock").get("/status")["peers"]]
    finally:
        demo.send_signal(signal.SIGCONT)
    seen += demo.communicate(timeout=60)[0]
    assert demo.returncode == 0
    assert held == ["int8", "int8"]
    assert ", int8 weights, draft " in seen.decode()


@pytest.mark.parametrize("moment", ["starting", "answering"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_at_any_moment_it_leaves_no_process(
    tiny_model: Path, how: signal.Signals, moment: str, trace: Trace
) -> None:
    command = [*DEMO, "--model", str(tiny_model), "--rtt", "100", "--max-tokens", "400", "--prompt", "the tide"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=trace.environment)
    assert demo.stdout is not None
    marker = b"first daemon opened" if moment == "starting" else b"Asking the first"
    seen = b""
    while marker not in seen:
        data = os.read(demo.stdout.fileno(), 4096)
        assert data, seen.decode()
        seen += data
    demo.send_signal(how)
    began = time.monotonic()
    demo.wait(20)
    took = time.monotonic() - began
    demo.stdout.close()
    if how != signal.SIGKILL:
        assert demo.returncode == 130
        assert took < 2.5
        assert trace.files() == set()  # a demo that was killed cannot tidy its folder
    wait_until(lambda: not trace.processes(), 5, trace.processes)


def test_a_failure_is_told_with_its_reason_and_leaves_nothing_behind(tmp_path: Path, trace: Trace) -> None:
    result = subprocess.run(
        [*DEMO, "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=trace.environment,
    )
    assert result.returncode == 1
    assert "config.json" in result.stderr
    assert (trace.processes(), trace.files()) == (set(), set())


@pytest.mark.parametrize(("name", "word"), [("first", "up"), ("second", "join")])
def test_a_daemon_that_is_killed_ends_the_demo_with_a_word_of_it(
    tiny_model: Path, name: str, word: str, trace: Trace
) -> None:
    command = [*DEMO, "--model", str(tiny_model), "--rtt", "300", "--max-tokens", "400", "--prompt", "the tide"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=trace.environment
    ) as demo:
        try:
            assert demo.stdout is not None
            while "Asking the first" not in demo.stdout.readline():
                assert demo.poll() is None
            (daemon,) = with_word(word, trace.processes())
            os.kill(daemon, signal.SIGKILL)
            said = demo.communicate(timeout=20)[1]
            assert demo.returncode == 1
            assert f"peerllm: the {name} process ended early (killed by signal 9)\n" in said
        finally:
            demo.terminate()
    assert trace.files() == set()
    wait_until(lambda: not trace.processes(), 3, trace.processes)
