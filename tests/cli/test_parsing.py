"""Options stand where people put them, and a room code need not stand on the command line."""

from __future__ import annotations

import argparse
import io
import os
import pty
import sys

import pytest

from peerllm.cli import join
from peerllm.cli import main as cli
from peerllm.cli.parsing import CommandParser
from peerllm.protocol.errors import BadRequest, WrongCode

CODE = "4127-copper-walnut-anchor"


def parsed(command: str, words: list[str]) -> argparse.Namespace:
    """What a command gets of the command line."""
    seen: list[argparse.Namespace] = []
    module = __import__(f"peerllm.cli.{command}", fromlist=["run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run", lambda args: seen.append(args) or 0)
        assert cli.main([command, *words]) == 0
    return seen[0]


@pytest.mark.parametrize(
    "words",
    [
        ["link", "--loopback", "--samples", "3", CODE],
        ["--loopback", "link", "--samples", "3", CODE],
        ["link", CODE, "--loopback", "--samples", "3"],
        ["--samples=3", "--loopback", "link", CODE],
    ],
    ids=" ".join,
)
def test_a_code_is_understood_wherever_the_options_stand(words: list[str]) -> None:
    args = parsed("bench", words)
    assert (args.what, args.code, args.loopback, args.samples) == ("link", CODE, True, 3)


@pytest.mark.parametrize("words", [["forget", "--state-dir", "d", "room"], ["--state-dir", "d", "forget", "room"]])
def test_a_room_to_forget_may_come_last(words: list[str]) -> None:
    args = parsed("rooms", words)
    assert (args.action, args.room, str(args.state_dir)) == ("forget", "room", "d")


def test_what_was_not_said_has_its_default() -> None:
    args = parsed("rooms", ["--json"])
    assert (args.action, args.room, args.json) == ("list", None, True)


def test_after_two_dashes_everything_is_a_word() -> None:
    assert parsed("ask", ["--max-tokens", "3", "--", "--json is what?"]).prompt == "--json is what?"


@pytest.mark.parametrize("words", [["rooms", "dance"], ["rooms", "forget", "a", "b"], ["bench", "link", "--dance"]])
def test_wrong_usage_is_still_wrong(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: peerllm" in capsys.readouterr().err


def test_a_choice_between_a_word_and_an_option_is_parsed_as_ever() -> None:
    parser = CommandParser()
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("shell", nargs="?")
    either.add_argument("--code")
    assert parser.parse_args(["bash"]).shell == "bash"
    assert parser.parse_args(["--code", "1"]).code == "1"


def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codes with which a daemon would be run."""
    found: list[str] = []
    monkeypatch.setattr(join, "run_daemon", lambda args, config: found.append(config.room_code) or 0)
    return found


def test_a_code_is_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = joined(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CODE}\n"))
    assert cli.main(["join", "--signaling", "ws://127.0.0.1:1"]) == 0
    assert found == [CODE]
    assert capsys.readouterr().out == ""


def test_a_code_is_asked_for_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = joined(monkeypatch)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(ours, f"{CODE}\n".encode())
        assert cli.main(["join", "--signaling", "ws://127.0.0.1:1"]) == 0
    os.close(ours)
    assert found == [CODE]
    assert "Room code: " in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "error"), [("", BadRequest), ("4127-copper", WrongCode)])
def test_no_code_and_half_a_code_are_said(monkeypatch: pytest.MonkeyPatch, typed: str, error: type[Exception]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    args = parser.parse_args(["--signaling", "ws://127.0.0.1:1"])
    args.socket = None
    with pytest.raises(error):
        join.run(args)


def test_without_a_server_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PEERLLM_SIGNALING", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CODE}\n"))
    assert cli.main(["join"]) == 1
    assert "no signaling server" in capsys.readouterr().err
    assert sys.stdin.read() == f"{CODE}\n"
