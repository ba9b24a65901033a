"""What people type to the lab. No network is made here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.__main__ import change, parse
from tests.lab.net import Host, Lab


class Told(Lab):
    """A lab of hosts that are not there, and what its wire would have been told."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts = {"a": Host("a", "none", "eth0", "203.0.113.11", None)}
        self.told: list[dict[str, Any]] = []

    def shape(self, port: str, **changes: Any) -> None:
        self.told.append({"port": port, **changes})


def test_options_are_read() -> None:
    options = "up --rtt 0 --loss 100 --jitter 2.5 --rate 20 --buffer 7 --nat symmetric --nat none"
    read = vars(parse(options.split()))
    assert [read[name] for name in ("rtt", "loss", "jitter", "rate", "buffer")] == [0, 100, 2.5, 20, 7]
    assert read["nat"] == ["symmetric", "none"]
    assert parse(["figures"]).samples == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rtt -5", "argument --rtt: -5 is not between 0 and 1000000"),
        ("--rtt nan", "nan is not between"),
        ("--rate inf", "inf is not between"),
        ("--loss 400", "argument --loss: 400 is not between 0 and 100"),
        ("--loss x", "argument --loss: 'x' is no number"),
        ("--nat none --nat none --nat none", "argument --nat: at most twice"),
    ],
)
def test_what_is_no_option_is_told(capsys: pytest.CaptureFixture[str], options: str, words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["up", *options.split()])
    assert words in capsys.readouterr().err


def test_lines_change_the_wire() -> None:
    lab = Told()
    change(lab, ["a", "loss=2", "rate=20", "cut", "restore", "mtu=1400"])
    said = [{"loss": 0.02}, {"rate": 20e6}, {"is_cut": True}, {"is_cut": False}, {"mtu": 1400}]
    assert lab.told == [{"port": "a", **each} for each in said]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a loss=x", "'loss=x' changes nothing: 'x' is no number"),
        ("a loss", "'loss' changes nothing: '' is no number"),
        ("a loss=500", "'loss=500' changes nothing: 500 is not between 0 and 100"),
        ("a delay=-1", "-1 is not between"),
        ("a mtu=70000", "not between 0 and 65535"),
        ("a jitter=nan", "nan is not between"),
        ("a lost=1", "'lost=1' is not one of"),
        ("c cut", "first the host"),
    ],
)
def test_a_slip_is_told_and_what_follows_it_is_done(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    lab = Told()
    change(lab, [*line.split()])
    assert words in capsys.readouterr().out
    assert lab.told == []
    change(lab, ["a", line.split()[1].replace("cut", "x"), "cut"])
    assert lab.told == [{"port": "a", "is_cut": True}]
