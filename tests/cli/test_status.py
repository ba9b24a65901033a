"""`peerllm status` and `peerllm models`."""

from __future__ import annotations

import json
from typing import Any

import pytest

import peerllm.models
from peerllm.cli import main as cli
from peerllm.cli.models import lines as models_lines
from peerllm.cli.status import lines
from peerllm.protocol.requests import ModelInfo
from peerllm.telemetry.ledger import RoundLedger


def test_status_shows_each_part_on_a_line(daemon: Any, peerllm: Any) -> None:
    assert peerllm("status").stdout.splitlines() == [
        "peerllm       0.1.0, ready",
        "model         tiny, 4 layers in float32, context 64, codec exact",
        "this peer     layers 0:2, drafts",
        "peer 01234567 layers 2:4, verifies",
        "link          UP, direct, round trip 83.2 ms, epoch 2, sent 1.2 MB, received 89 B, 3 packets sent again",
        "worker        ready, heartbeat 0.2 s ago, restarted 0 times",
        "requests      1 running, 1 waiting",
    ]


def test_status_json_is_the_daemons(daemon: Any, peerllm: Any) -> None:
    assert json.loads(peerllm("status", "--json").stdout) == daemon.backend.status()


def test_status_says_where_a_rounds_time_went() -> None:
    now = [0.0]
    ledger = RoundLedger(clock=lambda: now[0])
    for _ in range(3):
        now[0] += 0.5
        ledger.add_round(drafted=4, accepted=2, tokens=3, draft=0.1, network=0.083, total=0.5)
    shown = lines({"release": "1", "state": "ready", "ledger": ledger.summary()})
    assert shown[1] == (
        "rounds        3, 9 tokens, 6.0 tokens/s, 3.00 tokens a round, 50% of candidates accepted, "
        "first token after 500 ms"
    )
    assert shown[2] == (
        "median ms     draft 100.0, own layers 0.0, encode 0.0, network 83.0, their layers 0.0, verdict 0.0, "
        "whole round 500.0"
    )


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"release": "1", "state": "waiting", "model": None, "peers": [], "link": None, "ledger": None},
        {"worker": {"state": "starting", "beat_age_s": None}, "link": {"state": "ICE", "rtt_ms": None}},
        {"ledger": RoundLedger().summary()},
    ],
    ids=str,
)
def test_a_daemon_that_has_just_begun_has_a_status(status: dict[str, Any]) -> None:
    assert lines(status)[0].startswith("peerllm")


def test_the_cause_of_bad_health_is_shown_and_cannot_steer_the_terminal() -> None:
    status = {"release": "1", "state": "away", "health": {"well": False, "cause": "the peer \x1b[2J is away"}}
    assert lines(status) == ["peerllm       1, away: the peer \N{REPLACEMENT CHARACTER}[2J is away"]


CACHED = [
    ModelInfo(name="tiny", context_length=64, details={"layers": "2 of 4", "revision": None}),
    ModelInfo(name="other", details={"layers": "8", "bytes": 538_100_000, "folder": "/models/other"}),
]


def test_models_lists_the_cache_and_what_is_served() -> None:
    shown = models_lines(CACHED, {"tiny", "a folder"})
    assert shown == [
        "tiny  2 of 4 layers, served now",
        "other  8 layers, 538.1 MB, /models/other",
        "a folder  served now",
    ]


def test_an_empty_cache_says_how_to_fill_it() -> None:
    (line,) = models_lines([], set())
    assert "peerllm up --model" in line


@pytest.mark.parametrize("is_running", [True, False])
def test_models_works_with_a_daemon_and_without(
    request: Any, tmp_path: Any, monkeypatch: Any, capsys: Any, is_running: bool
) -> None:
    if is_running:
        request.getfixturevalue("daemon")
    monkeypatch.setattr(peerllm.models, "cached_models", lambda: CACHED)
    assert cli.main(["models", "--socket", str(tmp_path / "s"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["served"]) for model in listed] == [("tiny", is_running), ("other", False)]


@pytest.mark.parametrize("words", [("status",), ("status", "--json")], ids=str)
def test_a_reader_that_went_away_is_no_error_message(daemon: Any, peerllm: Any, words: tuple[str, ...]) -> None:
    with peerllm.start(*words) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(5) == 141
