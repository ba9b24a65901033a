"""A peer with little memory: both agree on what fits it, and what does not fit is refused before anything is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from peerllm.cli.status import lines
from peerllm.engine import memory
from peerllm.protocol.identity import LayerRange
from tests.e2e.rooms import START_SECONDS, room_code, stage, start_daemon, start_signaling, wait_ready
from tests.tiny_models import make_model

MOST = 32768
MEMINFO = """
import pathlib

read_text = pathlib.Path.read_text


def read(path, *args, **kwargs):
    if str(path) == "/proc/meminfo":
        return "MemTotal: {total} kB\\nMemAvailable: {free} kB\\n"
    return read_text(path, *args, **kwargs)


pathlib.Path.read_text = read
"""
"""Every Python process that finds this as sitecustomize has another kernel's word on its memory, and nothing else."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "long", "llama", context=MOST)


@pytest.fixture
def little(model: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine on which layers 2:4 fit with a context of 1,200, and a thirty-second of it spare."""
    needed = memory.plan_slice(
        model, LayerRange(2, 4), dtype="float32", weights="unquantised", context=1200, slots=1, free=0, is_gpu=False
    ).total
    free = -(-needed * 32 // 31) // 1024 + 1
    (tmp_path / "sitecustomize.py").write_text(MEMINFO.format(total=4 * free, free=free))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_without_a_wish_both_take_the_context_that_fits_the_smaller(model: Path, little: dict[str, str]) -> None:
    for opener, joiner in ((None, little), (little, None)):
        with stage() as here:
            signaling = start_signaling(here)
            layers = "0:2" if joiner else "2:4"
            up = ("up", "--model", str(model), "--layers", layers, "--dtype", "float32")
            first = start_daemon(here, "first", signaling, *up, env=opener)
            join = ("join", room_code(first), "--model", str(model))
            second = start_daemon(here, "second", signaling, *join, env=joiner)
            for daemon in (first, second):
                wait_ready(daemon)
                assert daemon.status()["model"]["context"] == 1024
                assert any(f"context 1024 of the model's {MOST}" in line for line in lines(daemon.status()))
            assert first.complete("the tide", max_tokens=8)["tokens"] == 8


def test_a_context_that_was_named_and_does_not_fit_is_refused_at_both_with_the_numbers(
    model: Path, little: dict[str, str]
) -> None:
    with stage() as here:
        signaling = start_signaling(here)
        up = ("up", "--model", str(model), "--layers", "0:2", "--dtype", "float32", "--context", "8192")
        first = start_daemon(here, "first", signaling, *up)
        join = ("join", room_code(first), "--model", str(model))
        second = start_daemon(here, "second", signaling, *join, env=little)
        for daemon in (first, second):
            assert daemon.child.wait_end(START_SECONDS) == 1
            said = daemon.child.log_tail()
            assert "keys and values of 8192 positions" in said
            assert re.search(r"MiB are free; a context of \d{4} would fit", said)
            assert "layers_loaded" not in said


def test_what_no_partner_could_mend_is_said_before_a_room_is_opened(model: Path, little: dict[str, str]) -> None:
    with stage() as here:
        up = ("up", "--model", str(model), "--layers", "2:4", "--dtype", "float32", "--context", "8192")
        alone = start_daemon(here, "alone", "ws://127.0.0.1:1", *up, env=little)
        assert alone.child.wait_end(START_SECONDS) == 1
        assert "MiB are needed" in alone.child.log_tail()
