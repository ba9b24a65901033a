"""`peerllm ask` as a user runs it: output, input, options, interruptions."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from typing import Any

import pytest

from peerllm.protocol import limits


def test_the_answer_is_printed_and_ends_with_one_newline(daemon: Any, peerllm: Any) -> None:
    result = peerllm("ask", "Hi")
    assert (result.returncode, result.stdout, result.stderr) == (0, "You said 'Hi'.\n", "")


def test_a_dash_reads_standard_input(daemon: Any, peerllm: Any) -> None:
    assert peerllm("ask", "-", input="Grüße").stdout == "You said 'Grüße'.\n"


def test_options_reach_the_daemon(daemon: Any, peerllm: Any) -> None:
    peerllm(
        "ask", "Hi", "--system", "Be short.", "--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9",
        "--seed", "7", "--stop", "a", "--stop", "b", "--draft-length", "0",
    )  # fmt: skip
    (request,) = daemon.backend.requests
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be short."),
        ("user", "Hi"),
    ]
    assert (request.max_tokens, request.stop, request.draft_length) == (5, ("a", "b"), 0)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.5, 0.9, 7)


def test_without_options_the_answer_is_greedy(daemon: Any, peerllm: Any) -> None:
    peerllm("ask", "Hi")
    assert daemon.backend.requests[0].sampling.is_greedy
    assert daemon.backend.requests[0].draft_length is None


def test_json_is_one_object_with_text_usage_and_ledger(daemon: Any, peerllm: Any) -> None:
    answer = json.loads(peerllm("ask", "Hi", "--json", "--seed", "7").stdout)
    assert answer["text"] == "You said 'Hi'."
    assert (answer["finish_reason"], answer["model"], answer["seed"]) == ("stop", "tiny", 7)
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert "medians_ms" in answer["ledger"]


@pytest.mark.parametrize(("prompt", "text"), [("refuse", ""), ("break", "You said 'break'\n")])
def test_an_error_is_a_message_and_a_status(daemon: Any, peerllm: Any, prompt: str, text: str) -> None:
    result = peerllm("ask", prompt)
    assert (result.returncode, result.stdout) == (1, text)
    assert result.stderr == "peerllm: The other peer is away.\n"


def test_a_value_that_the_daemon_refuses_is_named(daemon: Any, peerllm: Any) -> None:
    result = peerllm("ask", "Hi", "--temperature", "3")
    assert result.returncode == 1
    assert "'temperature' must be a number from 0 to 2" in result.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"\xff\xfe", "not UTF-8"), (b"x" * (limits.MAX_API_BODY_BYTES + 1), "more than")],
    ids=["bytes", "length"],
)
def test_input_that_cannot_be_asked_is_refused_in_words(daemon: Any, peerllm: Any, data: bytes, words: str) -> None:
    process = peerllm.start("ask", "-", stdin=subprocess.PIPE)
    _, errors = process.communicate(data, timeout=10)
    assert process.returncode == 1
    assert words in errors.decode()
    assert len(errors.splitlines()) == 1


def test_ctrl_c_stops_the_answer_at_once(daemon: Any, peerllm: Any) -> None:
    with peerllm.start("ask", "hang") as process:
        assert process.stdout.read(5) == b"You s"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=5)
    assert process.returncode == 130
    assert output.endswith(b"\n")
    assert b"Traceback" not in errors
    assert daemon.backend.ended.wait(5)


def test_a_reader_that_goes_away_stops_the_answer(daemon: Any, peerllm: Any) -> None:
    with peerllm.start("ask", "endless") as process:
        assert process.stdout.read(5) == b"You s"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(5) == 141
    assert daemon.backend.ended.wait(5)


def test_a_daemon_that_stops_in_mid_answer_is_an_error(daemon: Any, peerllm: Any) -> None:
    with peerllm.start("ask", "hang") as process:
        assert process.stdout.read(5) == b"You s"
        daemon.stop()
        _, errors = process.communicate(timeout=5)
    assert process.returncode == 1
    assert errors == b"peerllm: The daemon was stopped before the answer was complete.\n"


def test_what_takes_long_says_so_without_control_characters(daemon: Any, peerllm: Any) -> None:
    result = peerllm("ask", "late")
    assert result.stdout == "You said 'late'.\n"
    assert result.stderr == "Waiting for the answer …\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_reach_a_file_but_no_terminal(daemon: Any, peerllm: Any, is_terminal: bool) -> None:
    prompt = "\x1b[31mred\x07"
    if not is_terminal:
        assert peerllm("ask", prompt).stdout == prompt + ".\n"
        return
    ours, theirs = pty.openpty()
    with peerllm.start("ask", prompt, stdout=theirs):
        pass
    os.close(theirs)
    output = os.read(ours, 1000).decode()
    os.close(ours)
    assert output == "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}.\r\n"


def test_a_terminal_without_the_characters_gets_others(daemon: Any, peerllm: Any) -> None:
    with peerllm.start("ask", "😀", env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "latin-1"}) as process:
        output, errors = process.communicate(timeout=10)
    assert process.returncode == 0, errors
    assert output == b"You said '?'.\n"
