"""The script that builds, checks and times on a GPU says what it cannot do."""

from __future__ import annotations

import pytest
import torch

from tests.engine import on_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="would begin")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys):
    with pytest.raises(SystemExit) as ended:
        on_gpu.main([])
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_an_unknown_step_is_named(capsys):
    with pytest.raises(SystemExit):
        on_gpu.main(["chek"])
    assert "'chek' is no step; they are build, check, time" in capsys.readouterr().err


def test_every_file_that_it_names_is_there():
    files = [each for commands in on_gpu.STEPS.values() for command in commands for each in command if "/" in each]
    for file in files:
        if file.startswith("tests/"):
            assert (on_gpu.ROOT / file).is_file(), file
