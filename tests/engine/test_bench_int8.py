"""The bench of int8 products where there is no GPU."""

from __future__ import annotations

import pytest

from peerllm.engine import bench_int8


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "need a GPU; got 'cpu'"), ("cuda:99", "cannot be used"), ("nothing", "cannot be used")]
)
def test_a_device_that_cannot_run_it_is_refused_before_anything_is_compiled(
    device: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_int8, "_compile_all", None)
    with pytest.raises(SystemExit) as ended:
        bench_int8.main(["--device", device])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --device" in last and said in last
