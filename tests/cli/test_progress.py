"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import threading

import pytest

from peerllm.cli.progress import Progress, Waiting
from peerllm.cli.terminal import printable, size


class Screen(io.StringIO):
    """A stream that says whether it is a terminal, and tells when something was written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def flush(self) -> None:
        self.written.set()

    def shown(self) -> str:
        """The line that a terminal would show now."""
        return self.getvalue().rpartition("\r\x1b[K")[2]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_elsewhere_a_stage_is_a_line_and_so_is_each_quarter(clock: Clock) -> None:
    screen = Screen(is_terminal=False)
    progress = Progress(screen, clock=clock)
    for percent in range(101):
        progress.update("loading", percent / 100)
    progress.update("connecting")
    progress.update("connecting")
    progress.done()
    assert screen.getvalue() == ("loading 0%\nloading 25%\nloading 50%\nloading 75%\nloading 100%\nconnecting\n")


def test_on_a_terminal_one_line_is_rewritten_and_erased(clock: Clock) -> None:
    screen = Screen(is_terminal=True)
    progress = Progress(screen, clock=clock)
    progress.update("loading", 0.5)
    assert screen.shown() == "loading 50%"
    clock.now = 3.2
    progress.update("loading", 0.6)
    assert screen.shown() == "loading 60% 3 s"
    progress.update("connecting")
    assert screen.shown() == "connecting"
    progress.done("connected")
    assert screen.shown() == "connected\n"
    assert screen.getvalue().count("\n") == 1


def test_a_terminal_is_rewritten_ten_times_a_second_at_most(clock: Clock) -> None:
    screen = Screen(is_terminal=True)
    progress = Progress(screen, clock=clock)
    for step in range(10_000):
        clock.now = step / 10_000
        progress.update("loading", step / 20_000)
    assert screen.getvalue().count("loading") <= 11


def test_the_end_of_a_stage_is_always_shown(clock: Clock) -> None:
    screen = Screen(is_terminal=True)
    progress = Progress(screen, clock=clock)
    progress.update("loading", 0.5)
    progress.update("loading", 1.0)
    assert screen.shown() == "loading 100%"


def test_done_without_anything_shown_writes_nothing(clock: Clock) -> None:
    screen = Screen(is_terminal=True)
    Progress(screen, clock=clock).done()
    assert screen.getvalue() == ""


def test_a_fraction_out_of_range_is_brought_back(clock: Clock) -> None:
    screen = Screen(is_terminal=False)
    progress = Progress(screen, clock=clock)
    progress.update("loading", -1.0)
    progress.update("loading", 7.0)
    assert screen.getvalue() == "loading 0%\nloading 100%\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stage_that_a_peer_names_cannot_steer_the_terminal(clock: Clock, is_terminal: bool) -> None:
    screen = Screen(is_terminal=is_terminal)
    Progress(screen, clock=clock).update("loading\x1b[2J\nfake line")
    assert screen.getvalue().removeprefix("\r\x1b[K").strip() == "loading\N{REPLACEMENT CHARACTER}[2J fake line"


def test_waiting_shows_the_stage_only_when_it_takes_long() -> None:
    screen = Screen(is_terminal=False)
    with Waiting("waiting", Progress(screen), seconds=30) as waiting:
        waiting.stop()
        waiting.stop()
    assert screen.getvalue() == ""
    with Waiting("waiting", Progress(screen), seconds=0.001):
        assert screen.written.wait(5)
    assert screen.getvalue() == "waiting\n"


def test_printable_keeps_text_and_shows_controls() -> None:
    assert printable("Grüße\n\t漢字 😀") == "Grüße\n\t漢字 😀"
    assert printable("a\r\nb") == "a\nb"
    for control in ("\x1b", "\x07", "\x08", "\x7f", "\x9b", "\x00"):
        assert printable(control) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (538_100_000, "538.1 MB"), (15_200_000_000, "15.2 GB")],
)
def test_sizes_are_for_people(count: int, words: str) -> None:
    assert size(count) == words
