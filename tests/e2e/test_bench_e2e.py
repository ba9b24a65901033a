"""`peerllm bench e2e` with a tiny shape: real daemons, a real link, planted models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from peerllm.engine import planted, planting
from peerllm.engine.shapes import named_config
from tests.e2e.rooms import with_word

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


@pytest.mark.parametrize("moment", ["while it loads", "while it answers"])
def test_a_daemon_that_is_killed_ends_the_bench_at_once(moment: str) -> None:
    words = ("--shape", SHAPE, "--draft-shape", SHAPE, "--tokens", "1900", "--context", "2048", "--rtt", "300")
    with subprocess.Popen(
        [sys.executable, "-m", "peerllm", "bench", "e2e", "--threads", "1", "--devices", "cpu", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as bench:
        try:
            assert bench.stdout is not None and bench.stderr is not None
            if moment == "while it answers":
                while "tok/round" not in bench.stdout.readline():
                    assert bench.poll() is None
            joining = wait_until(lambda: next(iter(children_with("join", bench.pid)), None))
            os.kill(joining, signal.SIGKILL)
            began = time.monotonic()
            assert bench.wait(20) == 1
            # Half of it is for the other processes to end.
            assert time.monotonic() - began < 4
            assert bench.stderr.readline() == "peerllm: the second process ended early (killed by signal 9)\n"
        finally:
            bench.terminate()


def children_with(word: str, parent: int) -> list[int]:
    """Processes of `parent` with that word in their command line."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return with_word(word, map(int, children))


def wait_until(found: Callable[[], int | None], seconds: float = 60.0) -> int:
    deadline = time.monotonic() + seconds
    while (value := found()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value
