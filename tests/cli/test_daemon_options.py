"""What the person at the daemon's terminal (a pty) is told and asked."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from peerllm.cli.daemon_options import Terminal
from peerllm.daemon import events
from peerllm.daemon.config import DaemonConfig
from peerllm.protocol.identity import LayerRange

QUESTION = "1.20 GB of someone/model are not on this machine"


@pytest.fixture
def person(tmp_path: Path) -> Terminal:
    return Terminal(DaemonConfig(signaling="ws://127.0.0.1:1", state_dir=tmp_path, socket=tmp_path / "socket"))


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What is written here is typed at standard input."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


@pytest.mark.parametrize(("typed", "is_yes"), [("y", True), ("YES", True), ("", False), ("n", False), ("yo", False)])
def test_only_a_yes_is_a_yes(
    person: Terminal, keyboard: int, typed: str, is_yes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    os.write(keyboard, typed.encode() + b"\n")
    assert uvloop.run(person.may_download(QUESTION)) is is_yes
    assert QUESTION in capsys.readouterr().out


def test_a_question_that_nobody_answers_stops_neither_the_loop_nor_its_end(person: Terminal, keyboard: int) -> None:
    async def ask_and_leave() -> None:
        asking = asyncio.create_task(person.may_download(QUESTION))
        await asyncio.sleep(0.05)
        assert not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    began = time.monotonic()
    uvloop.run(ask_and_leave())
    assert time.monotonic() - began < 2


def test_without_a_terminal_nobody_is_asked(person: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nothing)
        assert uvloop.run(person.may_download(QUESTION)) is False
    assert QUESTION not in capsys.readouterr().out


def test_what_the_other_peer_says_cannot_steer_the_terminal(
    person: Terminal, keyboard: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "someone/\x1b[2Jmodel"
    person.tell(events.ReadyToServe(hostile, LayerRange(0, 2), 4, is_drafting=True, context=64, max_context=512))
    person.tell(events.Trouble(hostile))
    os.write(keyboard, b"n\n")
    uvloop.run(person.may_download(hostile))
    said = capsys.readouterr()
    shown = said.out + said.err
    assert shown.count("someone/\N{REPLACEMENT CHARACTER}[2Jmodel") == 3
    assert "\x1b" not in shown
