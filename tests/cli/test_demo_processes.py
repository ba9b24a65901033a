"""A stage's processes: Ctrl-C at the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from peerllm.cli.demo_processes import DemoFailed, Stage, stage
from peerllm.protocol.errors import SocketError

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


@pytest.fixture
def here() -> Iterator[Stage]:
    with stage() as made:
        yield made


SLEEPING = ("timeit", "-n1", "-r1", "import time; time.sleep(60)")


def test_waiting_for_one_process_ends_as_soon_as_another_is_dead(here: Stage) -> None:
    first, second = here.start("first", *SLEEPING), here.start("second", *SLEEPING)
    os.kill(second.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DemoFailed, match=r"the second process ended early \(killed by signal 9\)"):
        here.wait_for(first, "never", 20)
    assert time.monotonic() - began < 2


def test_a_process_that_is_killed_while_it_is_waited_for_is_told_so(here: Stage) -> None:
    child = here.start("first", *SLEEPING)
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(DemoFailed, match=r"the first process ended early \(killed by signal 9\)"):
        child.wait_for("never", 20)


def test_asking_ends_as_soon_as_a_process_is_dead(here: Stage) -> None:
    asked = threading.Event()
    child = here.start("second", *SLEEPING)
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(DemoFailed, match="the second process ended early"):
        here.while_all_live(lambda: asked.wait(20))
    asked.set()
    assert time.monotonic() - began < 2


def test_what_asking_gives_and_raises_comes_back(here: Stage) -> None:
    def fail() -> None:
        raise DemoFailed("no answer")

    here.start("alive", *SLEEPING)
    assert here.while_all_live(lambda: 7) == 7
    with pytest.raises(DemoFailed, match="no answer"):
        here.while_all_live(fail)


def test_a_lost_connection_is_told_as_the_death_that_it_came_from(here: Stage) -> None:
    child = here.start("first", *SLEEPING)

    def ask() -> None:
        os.kill(child.pid, signal.SIGKILL)
        raise SocketError("The daemon closed the connection")

    with pytest.raises(DemoFailed, match="the first process ended early"):
        here.while_all_live(ask)


def test_a_process_whose_end_was_awaited_is_not_missed(here: Stage) -> None:
    here.start("planting", "timeit", "-n1", "-r1", "pass").wait_end(20)
    here.check()
