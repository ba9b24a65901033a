"""Folders of a moment: what a killed command leaves behind, the next one removes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peerllm.cli.demo_processes import stage
from peerllm.cli.folders import MARK, private_folder
from tests.cli.conftest import environment


@contextmanager
def running(words: tuple[str, ...], url: str, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, once it has its keys and its room."""
    with subprocess.Popen(
        [sys.executable, "-m", "peerllm", *words, "--loopback", "--signaling", url],
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(temporary)},
    ) as process:
        try:
            assert process.stdout is not None
            assert "Room code" in process.stdout.readline()
            yield process
        finally:
            process.kill()


BENCH, DOCTOR = ("bench", "link"), ("doctor", "--wait", "--socket", "/nowhere/peerllm.sock")


@pytest.mark.parametrize(("killed", "following"), [(BENCH, DOCTOR), (DOCTOR, BENCH)], ids=["bench", "doctor"])
def test_keys_of_a_killed_command_are_swept_by_the_next_and_those_of_a_living_one_are_kept(
    killed: tuple[str, ...], following: tuple[str, ...], tmp_path: Path
) -> None:
    with stage() as here, private_folder("demo", tmp_path) as living:
        server = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
        url = server.wait_for(r"listening on (\S+)", 20)[1]
        with running(killed, url, tmp_path) as process:
            process.send_signal(signal.SIGKILL)
            process.wait(20)
        (dead,) = tmp_path.glob(f"peerllm-{killed[0]}-*/identity.key")
        with running(following, url, tmp_path):
            assert not dead.parent.exists()
            assert len(list(tmp_path.glob(f"peerllm-{following[0]}-*"))) == 1
            assert living.exists()


def test_a_folder_is_private_and_gone_at_its_end_and_nothing_else_is_touched(tmp_path: Path) -> None:
    names = ("peerllm-demo", "peerllm-other-1", "other", "peerllm-bench-results", "peerllm-demo-open")
    kept = [tmp_path / name for name in names]
    for each in kept:
        each.mkdir(mode=0o700)
    (kept[-1] / MARK).touch()
    kept[-1].chmod(0o755)  # made by somebody else, whatever its name
    (kept[-2] / "run1.json").touch()  # the user's own
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "peerllm-bench-link").symlink_to(elsewhere)
    dead = tmp_path / "peerllm-doctor-dead"
    dead.mkdir(mode=0o700)
    for name in (MARK, "identity.key"):
        (dead / name).touch()
    with private_folder("bench", tmp_path) as folder:
        (folder / "inner").mkdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not dead.exists()
    assert not folder.exists()
    assert elsewhere.exists() and all(each.exists() for each in kept)
    assert (kept[-2] / "run1.json").exists()
