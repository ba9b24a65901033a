"""The bench of memory where there is no GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from peerllm.engine import bench_memory
from peerllm.engine.planting import write_pair
from tests.engine.usage import usage_error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "argument --device: memory is counted on a GPU; got 'cpu'"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' cannot be used"),
        (["--context", "100"], "argument --context: 128 positions at least are needed"),
        (["--context", "9" * 23], "argument --context: 32768 positions at most"),
        (["--case", "99"], "argument --case: invalid choice: 99"),
        (["--case", "-1"], "argument --case: invalid choice: -1"),
        (["--device", "cpu", "--case", "0"], "argument --device: memory is counted on a GPU; got 'cpu'"),
        (["--shape", "huge"], "argument --shape: invalid choice: 'huge'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_memory, "write_pair", None)
    assert said in usage_error(bench_memory.main, arguments, capsys)


def test_each_case_loads_what_it_planned_and_runs_to_the_contexts_end(tmp_path: Path) -> None:
    write_pair(tmp_path, "qwen2.5-tiny", "qwen2.5-tiny", (0.9,), "float32")
    options = argparse.Namespace(
        context=256, dtype="float32", device="cpu", shape="qwen2.5-tiny", folder=str(tmp_path)
    )  # fmt: skip
    for case in bench_memory.CASES:
        holder = bench_memory.Holder(replace(case, path="graph"), options)
        plan, engine = holder.plan(), holder.load()
        assert plan.weights == engine.loaded.bytes["weights"] and (plan.draft > 0) == case.is_first
        holder.use(engine)
        assert max(engine._cache.lengths) == 256
