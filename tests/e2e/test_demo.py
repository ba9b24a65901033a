"""`peerllm demo` as a newcomer runs it, on a tiny model: what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.rooms import wait_until

DEMO = [sys.executable, "-m", "peerllm", "demo"]


def processes() -> set[int]:
    """Ours that run now, by their command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"peerllm" in words and state != "Z" and int(entry.name) != os.getpid():
                found.add(int(entry.name))
    return found


def stages() -> set[str]:
    return {entry.name for entry in Path("/tmp").glob("peerllm-demo-*")}


def test_it_prints_the_figures_as_json_and_leaves_nothing_behind(tiny_model: Path) -> None:
    before = processes(), stages()
    result = subprocess.run(
        [*DEMO, "--model", str(tiny_model), "--json", "--rtt", "20", "--max-tokens", "24", "--prompt", "the tide"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
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
    wait_until(lambda: (processes(), stages()) == before, 3, lambda: (processes() - before[0], stages() - before[1]))


@pytest.mark.parametrize("moment", ["starting", "answering"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_at_any_moment_it_leaves_no_process(tiny_model: Path, how: signal.Signals, moment: str) -> None:
    before, folders = processes(), stages()
    command = [*DEMO, "--model", str(tiny_model), "--rtt", "100", "--max-tokens", "400", "--prompt", "the tide"]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
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
        assert stages() == folders
    wait_until(lambda: processes() <= before, 5, lambda: processes() - before)
    for name in stages() - folders:  # a demo that was killed cannot tidy its folder
        subprocess.run(["rm", "-r", f"/tmp/{name}"], check=True)


def test_a_failure_is_told_with_its_reason_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = processes(), stages()
    result = subprocess.run([*DEMO, "--model", str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 1
    assert "config.json" in result.stderr
    assert (processes(), stages()) == before
