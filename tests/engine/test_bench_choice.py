"""The bench of choices where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine import bench_choice
from tests.engine.usage import usage_error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "argument --device: a choice is timed on a GPU; got 'cpu'"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' cannot be used"),
        (["--device", "nothing"], "argument --device: 'nothing' cannot be used"),
        (["--rows", "9", "66"], "argument --rows: a block has 1 to 65 rows"),
        (["--vocabulary", "1"], "argument --vocabulary: a number from 2 to 262144"),
        (["--vocabulary", "9" * 23], "argument --vocabulary: a number from 2 to 262144"),
        (["--repeats", "0"], "argument --repeats: a number from 1 up"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_made(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_choice, "figures", None)
    assert said in usage_error(bench_choice.main, arguments, capsys)


def test_every_sampling_is_timed_on_both_kinds_of_logits_and_for_every_count_of_rows() -> None:
    """By torch's chooser, which is the only one that a CPU has."""
    found = list(bench_choice.figures(torch.device("cpu"), vocabulary=50, row_counts=[1, 3], repeats=1))
    assert all(each.chooser == "torch with cuts" and each.microseconds > 0 for each in found)
    assert [(each.rows, each.logits, each.sampling) for each in found] == [
        (rows, kind, sampling) for rows in (1, 3) for kind in bench_choice.KINDS for sampling in bench_choice.SAMPLINGS
    ]
