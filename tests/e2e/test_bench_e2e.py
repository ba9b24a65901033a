"""`peerllm bench e2e` with a tiny shape: real daemons, a real link, planted models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from peerllm.engine import planted, planting
from peerllm.engine.shapes import named_config

SHAPE, LENGTH, TOKENS, RTT = "qwen2.5-tiny", 6, 60, 15.0
RATES = (0.9, 0.6)


def expected_rounds(follows: list[int], letter: int, right: list[int]) -> int:
    """Rounds of an answer whose tokens are `right`, drafted by what says `follows` after each token."""
    made, rounds = [letter], 0
    while len(made) <= len(right):
        limit = min(LENGTH, len(right) - len(made))
        accepted = 0
        while accepted < limit and follows[made[-1]] == right[len(made) - 1]:
            made.append(right[len(made) - 1])
            accepted += 1
        made.append(right[len(made) - 1])
        rounds += 1
    return rounds


def test_two_daemons_make_the_planted_answer_in_the_rounds_that_the_chosen_agreement_takes(tmp_path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("11010\n01101\n")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "peerllm", "bench", "e2e", "--json", "--threads", "1"),
            # The whole way through the daemons: layers over two devices, the draft beside them.
            *("--devices", "cpu,cpu", "--draft-device", "cpu"),
            *("--shape", SHAPE, "--draft-shape", SHAPE, "--agree", f"{RATES[0]},@{trace}", "--rtt", str(RTT)),
            *("--draft-length", str(LENGTH), "--tokens", str(TOKENS), "--context", "512", "--dtype", "float32"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    written = planting.write_pair(tmp_path, SHAPE, SHAPE, (RATES[0], "t1101001101"), "float32")
    follows = planting.read_recipe(written["draft"]).follows()
    vocabulary = named_config(SHAPE).vocab_size
    *speculative, plain = figures["answers"]
    for answer, ((letter, first), *_) in zip(speculative, written["starts"], strict=True):
        token = vocabulary - planted.ALPHABET + planted.alphabet().index(letter)
        assert answer["is_right"]
        assert answer["rounds"] == expected_rounds(follows, token, list(range(first, first + TOKENS)))
        assert answer["medians_ms"]["network"] > RTT
        assert answer["tokens_per_second"] > 0 and 0 < answer["draft_and_own_share"] < 1
    assert speculative[0]["tokens_per_round"] > speculative[1]["tokens_per_round"] > plain["tokens_per_round"] == 1
    assert figures["mean_tokens_per_second"][str(TOKENS)] == pytest.approx(
        sum(each["tokens_per_second"] for each in speculative) / len(RATES)
    )
    assert figures["loading_seconds"]["first"] and figures["loading_seconds"]["second"]
    # What was measured stands on the terminal before the bench is through.
    assert "tok/round" in result.stderr
