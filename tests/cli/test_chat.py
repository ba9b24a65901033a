"""`peerllm chat` on a terminal and without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


class Terminal:
    """`peerllm chat` on a pseudo-terminal, as a user sees and types it."""

    def __init__(self, peerllm: Any, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = peerllm.start(
            "chat", *words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the controlling terminal
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> None:
        """Reads until `text` has come since the last call."""
        while text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], 10)
            assert ready, f"{text!r} did not come: {self.seen!r}"
            self.seen += os.read(self._ours, 4096).decode(errors="replace")
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(daemon: Any, peerllm: Any) -> Iterator[Terminal]:
    terminal = Terminal(peerllm)
    terminal.expect("tiny")
    terminal.expect("> ")
    yield terminal
    terminal.close()


def messages_of(daemon: Any, index: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in daemon.backend.requests[index].messages]


def test_a_conversation_goes_on_with_what_was_said(daemon: Any, terminal: Terminal) -> None:
    terminal.type("one\r")
    terminal.expect("You said 'one'.")
    terminal.expect("> ")
    terminal.type("two\r")
    terminal.expect("You said 'two'.")
    assert messages_of(daemon) == [("user", "one"), ("assistant", "You said 'one'."), ("user", "two")]
    terminal.type("/new\r")
    terminal.expect("> ")
    terminal.type("three\r")
    terminal.expect("You said 'three'.")
    assert messages_of(daemon) == [("user", "three")]


def test_ctrl_c_stops_the_answer_and_not_the_chat(daemon: Any, terminal: Terminal) -> None:
    terminal.type("hang\r")
    terminal.expect("You said 'hang'")
    terminal.type("\x03")
    terminal.expect("[stopped]")
    assert daemon.backend.ended.wait(5)
    terminal.expect("> ")
    terminal.type("more\r")
    terminal.expect("You said 'more'.")
    assert messages_of(daemon) == [("user", "hang"), ("assistant", "You said 'hang'"), ("user", "more")]


def test_ctrl_c_at_the_prompt_clears_the_line(daemon: Any, terminal: Terminal) -> None:
    terminal.type("not this")
    terminal.expect("not this")
    terminal.type("\x03")
    terminal.expect("> ")
    terminal.type("this\r")
    terminal.expect("You said 'this'.")


@pytest.mark.parametrize("keys", ["\x04", "/exit\r"])
def test_ctrl_d_and_exit_leave(terminal: Terminal, keys: str) -> None:
    terminal.type(keys)
    assert terminal.process.wait(5) == 0


def test_the_line_can_be_edited_and_the_last_one_called_back(daemon: Any, terminal: Terminal) -> None:
    terminal.type("ac\x1b[Db\r")
    terminal.expect("You said 'abc'.")
    terminal.expect("> ")
    terminal.type("\x1b[A\x7fd\r")
    terminal.expect("You said 'abd'.")


def test_an_error_ends_the_answer_and_not_the_chat(daemon: Any, terminal: Terminal) -> None:
    terminal.type("refuse\r")
    terminal.expect("peerllm: The other peer is away.")
    terminal.expect("> ")
    terminal.type("again\r")
    terminal.expect("You said 'again'.")
    assert messages_of(daemon) == [("user", "again")]


def test_a_conversation_that_is_too_long_can_begin_again(daemon: Any, peerllm: Any) -> None:
    result = peerllm("chat", input="one\noverflow\n/new\noverflow\n")
    assert result.stderr == "peerllm: The conversation has 65 tokens; the context holds 64. /new begins again.\n"
    assert result.stdout == "You said 'one'.\n\nYou said 'overflow'.\n"


def test_without_a_terminal_lines_come_in_and_answers_go_out(daemon: Any, peerllm: Any) -> None:
    result = peerllm("chat", "--system", "Be short.", input="one\n\ntwo\n/exit\nthree\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "You said 'one'.\nYou said 'two'.\n"
    assert messages_of(daemon)[0] == ("system", "Be short.")


def test_without_a_terminal_ctrl_c_at_the_prompt_leaves(daemon: Any, peerllm: Any) -> None:
    with peerllm.start("chat", stdin=subprocess.PIPE) as process:
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"You said 'one'.\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
    assert process.returncode == 130
    assert b"Traceback" not in errors
