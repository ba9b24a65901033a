"""The options of `peerllm distill`, and what `--draft` takes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from peerllm.cli import distill
from peerllm.cli.drafts import draft_named
from peerllm.cli.main import main
from peerllm.protocol.errors import BadRequest


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    distill.add_arguments(parser)
    return parser.parse_args(["--target", "M", "--out", "D", *words])


def test_counts_may_be_written_in_thousands_and_millions():
    assert options("--tokens", "40M").tokens == 40_000_000
    assert options("--tokens", "2.5k").tokens == 2500
    assert options("--init-from", "0,1,28,29").init_from == (0, 1, 28, 29)
    assert options("--temperatures", "0,0.8").temperatures == (0.0, 0.8)
    assert options().tokens is None, "what is not said is the recipe's own"


@pytest.mark.parametrize(
    "words", [("--tokens", "0"), ("--tokens", "many"), ("--init-from", "a"), ("--tokens", "5", "--hours", "1")]
)
def test_options_that_make_no_sense_are_wrong_usage(words):
    with pytest.raises(SystemExit) as error:
        options(*words)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plot", "/nowhere/run.svg"), "/nowhere is no folder"),
        (("--report-minutes", "0"), "--report-minutes"),
        (("--evaluation-prompts", "-1"), "--evaluation-prompts"),
    ],
)
def test_what_no_run_could_use_is_said_before_torch_is_imported(words, said, capsys):
    assert main(["distill", "--target", "M", "--out", "/tmp/nowhere/D", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_folder_that_is_exported_to_has_to_be_new(tmp_path, capsys):
    (tmp_path / "something").touch()
    assert main(["distill", "--target", "M", "--out", str(tmp_path / "D"), "--export-hf", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err


def test_a_target_that_is_nowhere_is_an_error_in_words(tmp_path, capsys):
    assert main(["distill", "--target", str(tmp_path / "no model"), "--out", str(tmp_path / "D")]) == 1
    assert "no model" in capsys.readouterr().err


def test_the_command_runs_where_only_torch_and_transformers_are():
    blocked = ["aiortc", "aioice", "aiohttp", "uvloop", "cbor2", "structlog", "spake2"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import peerllm.cli.main, peerllm.cli.distill, peerllm.engine.distill.run, peerllm.engine.distill.bench"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_draft_is_named_by_a_word_or_by_its_folder(tmp_path):
    assert [draft_named(words) for words in ("none", "ngram", "model:there")] == ["none", "ngram", "model:there"]
    assert draft_named(str(tmp_path)) == f"model:{tmp_path}"
    for words in ("model:", "", "n-gram", str(tmp_path / "nowhere")):
        with pytest.raises(BadRequest, match="--draft"):
            draft_named(words)
