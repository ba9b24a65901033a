"""How the engine's benches end, and what they leave behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peerllm.engine import benching
from peerllm.protocol.errors import NotEnoughMemory


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (NotEnoughMemory("it needs more"), 1, "it needs more"),
        (torch.OutOfMemoryError("CUDA out of memory.\nMore"), 1, "memory ran out: CUDA out of memory."),
        (MemoryError(), 1, "memory ran out: MemoryError"),
        (PermissionError(errno.EACCES, "Permission denied", "model.json"), 1, "model.json: Permission denied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_user_can_meet_is_one_line_and_a_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert benching.run("a bench", work) == status
    assert capsys.readouterr().err == f"a bench: {said}\n"


def test_a_bug_is_raised() -> None:
    def work() -> int:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        benching.run("a bench", work)


_BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
_PRINTS = "import sys; from peerllm.engine.benching import run; sys.exit(run('a bench', lambda: print('x') or 0))"


def _print_to(output: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PRINTS]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=_BUFFERED)


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = _print_to(full)
    assert (done.returncode, done.stderr) == (1, "a bench: cannot write: No space left on device\n")


def test_a_reader_that_went_away_is_one_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = _print_to(writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "a bench: nobody reads the output\n")


@pytest.mark.parametrize("name", ["bench", "bench_int8", "bench_memory"])
def test_a_bench_leaves_nothing_in_the_temporary_folder(name: str, tmp_path: Path) -> None:
    kept, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(kept)}
    command = [sys.executable, "-m", f"peerllm.engine.{name}", "--device", "meta"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "argument --device" in done.stderr
    assert not list(temporary.iterdir()), "TMPDIR"
