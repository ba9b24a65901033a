"""A stage's processes: Ctrl-C at the worst moment."""

from __future__ import annotations

import subprocess
import sys

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

theirs = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
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
        os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print([child._process.poll() is not None for child in here._children], os.path.exists(here.folder))
print({number: signal.getsignal(number) for number in theirs} == mine)
"""


def test_ends_asked_for_again_while_it_ends_leave_nothing_behind_and_handlers_are_given_back():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("[True] False\nTrue\n", "")


def test_an_end_asked_for_while_a_process_is_forked_is_not_lost_and_neither_is_the_process():
    for name in ("SIGINT", "SIGTERM"):
        done = subprocess.run(
            [sys.executable, "-c", AT_THE_WORST_MOMENT, name], capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.stdout, done.stderr) == ("stopped 1 [True]\n", ""), name
