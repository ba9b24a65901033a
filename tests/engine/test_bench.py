"""The bench of steps where there is no GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peerllm.engine import bench, bench_limits, bench_report
from tests.engine.usage import usage_error

SMALL = ["--device", "cpu", "--context", "80", "--repeats", "1", "--dtype", "float32",
         "--shape", "qwen2.5-tiny", "--draft-shape", "qwen2.5-tiny"]  # fmt: skip
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nSee documentation")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_PREFILL_CHUNKS", (128, 68))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_: 1e9)


def _made(paths: list[str]) -> bench.Bench:
    options = argparse.Namespace(dtype="float32", context=80, repeats=1)
    return bench.Bench(torch.device("cpu"), paths, options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "meta"], "argument --device: cpu or a GPU of CUDA; got 'meta'"),
        (["--device", "nothing"], "argument --device: 'nothing' cannot be used"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' cannot be used"),
        (["--context", "64"], "argument --context: 65 positions at least"),
        (["--context", "32769"], "argument --context: 32768 positions at most"),
        (["--context", "100000000000"], "argument --context: 32768 positions at most"),
        (["--context", "9" * 23], "argument --context: 32768 positions at most"),
        (["--repeats", "0"], "argument --repeats: a number from 1 up"),
        (["--device", "cpu", "--paths", "graph", "int8"], "argument --paths: one of eager, graph and fused"),
        (["--device", "cpu", "--profile", "/nowhere/trace"], "argument --profile: /nowhere/trace cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "Bench", None)
    assert said in usage_error(bench.main, arguments, capsys)


def test_paths_that_do_not_run_on_the_device_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--json", "--paths", "int8", "eager"]) == 0
    out, err = capsys.readouterr()
    assert err == "not on cpu: int8\n"
    found = json.loads(out)
    assert found["failed"] == [] and len(found["rows"]) == 9 and found["rows"][0]["eager"] > 0


@pytest.mark.parametrize(("rate", "said"), [(0.0412e12, "matrix_tflop_s 0.0412"), (713.6e12, "matrix_tflop_s 714")])
def test_a_small_rate_keeps_its_digits(
    rate: float, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", lambda *_: None)
    monkeypatch.setattr(bench, "matrix_rate", lambda *_: rate)
    assert bench.main(SMALL) == 0
    out, err = capsys.readouterr()
    assert said in out and err == ""


def test_a_step_that_does_not_fit_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench.random_slice

    def full(config: Any, layers: Any, **options: Any) -> Any:
        if (layers.first, layers.last) == (1, 3):
            raise FULL
        return made(config, layers, **options)

    monkeypatch.setattr(bench, "random_slice", full)
    assert bench.main(SMALL) == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"{step}: does not fit the memory of cpu: CUDA out of memory. Tried to allocate 4.00 GiB."
        for step in ("half qwen2.5-tiny, eager", "prefill")
    ]
    steps = [line.split("  ")[0] for line in out.splitlines()]
    assert "qwen2.5-tiny draft, one token" in steps and "last half, with verdict, 65 tokens" in steps
    assert not any(step.startswith(("half qwen2.5-tiny,", "prefill")) for step in steps)


def test_of_a_step_that_ran_out_in_a_capture_the_rows_before_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = bench.Bench._inputs

    def full(self: bench.Bench, part: Any, rows: int) -> torch.Tensor:
        try:
            if rows == 65:
                raise FULL
        finally:
            # A capture's end has an error of its own while the first one passes through.
            if rows == 65:
                raise RuntimeError("operation failed due to a previous error during capture")
        return inputs(self, part, rows)

    made = _made(["eager"])
    monkeypatch.setattr(bench.Bench, "_inputs", full)
    with torch.inference_mode():
        made.target("qwen2.5-tiny", bench.LayerRange(1, 3), (1, 9, 65), "half")
    assert [row["step"] for row in made.rows] == ["half, 1 tokens", "half, 9 tokens"]
    assert made.failed == ["half, eager"] and capsys.readouterr().err.startswith("half, eager: does not fit")


def test_where_int8_alone_fits_its_row_has_no_ratio() -> None:
    made = _made(["fused", "int8"])
    made.add("half", 10**6, {"int8": 1.5})
    made.add("other", 10**6, {})
    assert made.rows == [{"step": "half", "int8": 1.5, "limit": 1.0}]
    assert bench_report.table(made.rows).splitlines()[1].split() == ["half", "—", "—", "—", "1.500", "1.000", "—"]


@pytest.mark.parametrize(("free", "size"), [(141 << 30, 4 << 30), (7 << 30, 7 << 28), (100 << 20, 256 << 20)])
def test_a_copy_takes_a_quarter_of_what_a_gpu_has_free_at_most(
    free: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerllm.engine.memory.free_memory", lambda _: free)
    assert bench_limits.copy_size(torch.device("cuda")) == size


def test_a_trace_holds_blocks_of_a_draft_that_is_warm_and_nothing_of_its_making(tmp_path: Path) -> None:
    made = _made(["eager"])
    with torch.inference_mode():
        lines = made.profile("qwen2.5-tiny", tmp_path / "trace.json")
    names = [event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert not [name for name in names if "normal_" in name]
    assert len(lines) == 10 and all(" us x " in line for line in lines)
    # A step reads the embedding once: a prompt that was not taken in before would be one call more.
    assert names.count("aten::embedding") == 3 * 8
