"""The bench of int8 products where there is no GPU."""

from __future__ import annotations

import pytest

from peerllm.engine import bench_int8
from tests.engine.usage import usage_error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "argument --device: these kernels need a GPU; got 'cpu'"),
        (["--device", "meta"], "argument --device: these kernels need a GPU; got 'meta'"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' cannot be used"),
        (["--device", "nothing"], "argument --device: 'nothing' cannot be used"),
        (["--context", "64"], "argument --context: 65 positions at least"),
        (["--context", "9" * 23], "argument --context: 32768 positions at most"),
        (["--repeats", "0"], "argument --repeats: a number from 1 up"),
        (["--compiler", "-1"], "argument --compiler: invalid choice: -1"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_compiled(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_int8, "_compile_all", None)
    assert said in usage_error(bench_int8.main, arguments, capsys)
