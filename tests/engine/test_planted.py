"""Planted models: the next token is known, and so is where the draft is wrong."""

from __future__ import annotations

import pytest

from peerllm.engine import planted
from peerllm.engine.shapes import named_config
from peerllm.protocol.requests import Sampling
from tests.engine.pairs import Pair
from tests.engine.usage import usage_error

VOCABULARY = 2048
TRACE = [True, True, False, True, False, False, True, True, True, True, False, True, True, True, True, True]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return planted.write_planted(tmp_path_factory.mktemp("target"), named_config("qwen2.5-tiny"), dtype="float32")


def _draft(path, disagreements):
    config = named_config("qwen2.5-tiny")
    return planted.write_planted(path, config, dtype="float32", disagreements=disagreements, seed=5)


def test_after_each_token_comes_the_next(target):
    pair = Pair.load(target, context=128)
    assert pair.generate([7, 3, 100], 40, 0).tokens == list(range(101, 141))
    assert pair.generate([2000, 2040], 12, 0).tokens == [*range(2041, 2048), *range(8, 13)]


def test_a_draft_is_wrong_where_the_trace_says_so_and_nowhere_else(target, tmp_path):
    draft = _draft(tmp_path / "draft", planted.traced_disagreements(100, TRACE, VOCABULARY))
    pair = Pair.load(target, context=128, draft=f"model:{draft}")
    pair.open(1, Sampling(), [50, 100])
    known, tokens = 0, [50, 100]
    for agrees in TRACE:
        block = pair.first.draft_block(1, known, tokens[known:], 1)
        verdict = pair.last.verify(1, block.start, block.candidates, block.payload)
        assert verdict.accepted == agrees
        known = len(tokens)
        # One place at a time, whatever was accepted.
        tokens = [*tokens, tokens[-1] + 1]


def test_a_draft_agrees_at_the_rate_that_was_asked_for(target, tmp_path):
    wrong = planted.random_disagreements(VOCABULARY, 0.8)
    assert len(wrong) / VOCABULARY == pytest.approx(0.2, abs=0.02)
    pair = Pair.load(target, context=512, draft=f"model:{_draft(tmp_path / 'draft', wrong)}")
    run = pair.generate([100], 400, 4)
    assert run.tokens == list(range(101, 501))
    # Blocks of 4 at 0.8 a token: (1 - 0.8**5) / (1 - 0.8) = 3.36 tokens a round.
    assert 400 / run.rounds == pytest.approx(3.36, rel=0.12)


def test_the_tokens_are_words_that_come_back(target):
    from peerllm.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(target)
    prompt = tokenizer.encode_prompt("go on\n")
    assert len(prompt) == 6 and prompt[-1] == VOCABULARY - 1
    pair = Pair.load(target, context=64)
    assert tokenizer.decode(pair.generate(prompt, 4, 0).tokens) == " t8 t9 t10 t11"


@pytest.mark.parametrize("share", ["1.5", "-1", "nan", "most"])
def test_a_share_is_from_0_to_1(share: str, tmp_path, capsys) -> None:
    words = [str(tmp_path / "model"), "--shape", "qwen2.5-tiny", f"--agree={share}"]
    assert "argument --agree: " in usage_error(planted.main, words, capsys)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("place", ["a file", "a file/in it", "no tensor"])
def test_a_folder_that_cannot_be_written_is_one_line(place: str, tmp_path, capsys) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "no tensor" / "layer-0.safetensors").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        planted.main([str(tmp_path / place), "--shape", "qwen2.5-tiny"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m peerllm.engine.planted: {tmp_path / place} cannot be written: ")
