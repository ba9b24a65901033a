"""A stage's processes: Ctrl-C at the worst moment."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

AT_THE_WORST_MOMENT = """
import os, signal, sys
from peerllm.cli.demo_processes import stage

signal.signal(signal.SIGINT, signal.default_int_handler)
forks = []


def press_ctrl_c():
    forks.append(1)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))


os.register_at_fork(after_in_parent=press_ctrl_c)
try:
    with stage() as here:
        here.start("sleeping", "http.server", "0")
        print("went on")
except KeyboardInterrupt:
    print("stopped", len(forks), [child._process.poll() is not None for child in here._children])
"""


TWICE = """
import os, signal, sys
from peerllm.cli.demo_processes import Stage, stage

ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
theirs = {number: signal.signal(number, lambda *_: None) for number in ends}
mine = {number: signal.getsignal(number) for number in theirs}
stop = Stage.stop


def press_again(here):
    for number in theirs:
        os.kill(os.getpid(), number)
    stop(here)


Stage.stop = press_again
try:
    with stage() as here:
        here.start("sleeping", "http.server", "0")
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
except KeyboardInterrupt:
    print([child._process.poll() is not None for child in here._children], os.path.exists(here.folder))
print({number: signal.getsignal(number) for number in theirs} == mine)
"""


IGNORED = """
import os, signal
from peerllm.cli.demo_processes import stage

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stage() as here:
    os.kill(os.getpid(), signal.SIGHUP)
    print("went on")
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
"""


def run(code: str, *words: str) -> tuple[str, str]:
    """What it printed, and its errors. What runs under nohup begins with a SIGHUP that is ignored; this does not."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_ends_asked_for_again_while_it_ends_leave_nothing_behind_and_handlers_are_given_back(name: str) -> None:
    assert run(TWICE, name) == ("[True] False\nTrue\n", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_end_asked_for_while_a_process_is_forked_is_not_lost_and_neither_is_the_process(name: str) -> None:
    assert run(AT_THE_WORST_MOMENT, name) == ("stopped 1 [True]\n", "")


def test_a_hangup_that_is_ignored_stays_so() -> None:
    assert run(IGNORED) == ("went on\nTrue\n", "")
