"""`peerllm doctor`: what it prints, in what shape, how it ends, and that it ends."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from peerllm.cli.demo_processes import stage
from peerllm.cli.doctor import lines
from tests.cli.conftest import environment

pytestmark = pytest.mark.timeout(300)
SECONDS = 200.0
"""None comes near it; a machine that is busy imports torch in half a minute."""
TOP = {
    "release", "signaling", "nat", "candidates", "relays", "link", "loop", "machine", "versions", "daemon", "works",
    "advice",
}  # fmt: skip


def doctor(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "peerllm.cli.main", "doctor", "--socket", "/nowhere/peerllm.sock", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment(),
        **more,
    )


@contextlib.contextmanager
def signaling() -> Iterator[str]:
    with stage() as here:
        server = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
        yield server.wait_for(r"listening on (\S+)", 20)[1]


def test_alone_it_looks_at_this_machine_and_ends() -> None:
    with signaling() as url:
        result = doctor("--json", "--signaling", url)
    report = json.loads(result.stdout)
    assert set(report) == TOP
    assert report["works"] is True
    assert result.returncode == 0
    assert report["signaling"]["url"] == url
    assert report["signaling"]["error"] is None
    assert report["signaling"]["connect_ms"] > 0
    assert set(report["nat"]) == {"kind", "why_unknown", "addresses"}
    assert report["link"] is None
    assert set(report["loop"]) == {"worst_ms", "blocked_count"}
    assert report["machine"]["error"] is None
    assert report["machine"]["devices"][-1]["device"] == "cpu"
    assert {"peerllm", "python", "torch", "transformers", "aiortc", "aioice", "system"} <= set(report["versions"])
    assert all(set(each) == {"text", "prevents"} for each in report["advice"])
    assert report["daemon"] is None
    assert lines(report)[0].startswith("signaling")


def test_a_server_that_is_not_there_is_one_clear_line_and_a_status() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
        result = doctor("--signaling", url)
    assert result.returncode == 1
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("Prevents it:")]
    assert url in said
    assert "cannot be reached" in said
    assert "versions" in result.stdout  # the rest is looked at all the same


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = doctor("--signaling", f"ws://127.0.0.1:{silent.getsockname()[1]}")
    assert result.returncode == 1
    assert "does not answer" in result.stdout


def test_without_a_server_it_says_what_to_name() -> None:
    result = doctor()
    assert result.returncode == 1
    assert "Prevents it: No signaling server is named" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"), [(["--wait", "4127-copper-walnut-anchor"], "one of the two"), (["4127-copper"], "3 words")]
)
def test_wrong_usage_is_said_at_once(words: list[str], said: str) -> None:
    result = doctor(*words)
    assert result.returncode == 1
    assert said in result.stderr
    assert result.stdout == ""


def test_with_a_code_both_ends_print_the_link_and_end() -> None:
    with signaling() as url, stage() as here:
        common = ("--signaling", url, "--loopback", "--socket", "/nowhere/peerllm.sock")
        waiting = here.start("waiting", "peerllm", "doctor", "--wait", *common)
        code = waiting.wait_for(r"peerllm doctor (\d\S+)", SECONDS)[1]
        joining = here.start("joining", "peerllm", "doctor", "--json", *common, code)
        report = json.loads(joining.wait_for(r"(?s)\{.*^\}", SECONDS)[0])
        assert (waiting.wait_end(SECONDS), joining.wait_end(SECONDS)) == (0, 0)
        assert waiting.wait_for(r"link +loopback, up after", 1)
    link = report["link"]
    assert link["path"] == "loopback"
    assert link["error"] is None
    assert link["other_release"] == report["release"]
    assert 0 < link["rtt_ms"] <= link["rtt_p95_ms"]
    assert min(link["mbit_out"], link["mbit_in"]) > 0.5
    assert max(link["loss_out"], link["loss_in"]) < 0.2
    assert report["works"] is True


def test_a_code_that_nobody_opened_ends_with_a_status() -> None:
    with signaling() as url:
        result = doctor("--signaling", url, "4127-copper-walnut-anchor")
    assert result.returncode == 1
    assert "There is no room of this number" in result.stdout


def test_the_text_has_a_line_for_each_part_and_no_control_characters() -> None:
    report: dict[str, Any] = {
        "release": "0.1.0",
        "signaling": {"url": "wss://example.org/\x1b[2J", "connect_ms": 80.2, "round_trip_ms": 40.1, "error": None},
        "nat": {
            "kind": "symmetric",
            "why_unknown": None,
            "addresses": [{"local": "10.1.0.2", "seen": "203.0.113.11"}],
        },
        "candidates": [{"kind": "host", "address": "2001:db8::1", "port": 4711}],
        "relays": [
            {"host": "relay.example.org", "port": 5349, "transport": "tls", "answers": True, "ms": 43.0},
            {"host": "relay.example.org", "port": 3478, "transport": "udp", "answers": False, "ms": 3000.0},
        ],
        "link": {
            "path": "relayed", "error": None, "seconds_to_up": 1.02, "other_release": "0.1.0", "rtt_ms": 80.1,
            "rtt_p95_ms": 81.2, "loss_out": 0.0123, "loss_in": 0.0, "mbit_out": 18.2, "mbit_in": 17.9,
            "retransmitted": 3,
        },
        "loop": {"worst_ms": 3.1, "blocked_count": 0},
        "machine": {
            "error": None,
            "devices": [
                {"device": "cuda:0", "name": "T4", "free_bytes": 15_000_000_000, "total_bytes": 16_000_000_000},
                {"device": "cpu", "name": "CPU", "free_bytes": 8_000_000_000, "total_bytes": 16_000_000_000},
            ],
        },
        "versions": {"peerllm": "0.1.0"},
        "daemon": {"state": "away", "well": False, "cause": "the other peer is away", "loop": None},
        "works": True,
        "advice": [{"text": "Do this.", "prevents": False}],
    }  # fmt: skip
    shown = lines(report)
    assert shown == [
        "signaling     wss://example.org/\N{REPLACEMENT CHARACTER}[2J reached in 80 ms, answers in 40 ms",
        "NAT           symmetric (10.1.0.2 is seen as 203.0.113.11)",
        "candidates    host [2001:db8::1]:4711",
        "relay         relay.example.org:5349 over TLS answers in 43 ms",
        "relay         relay.example.org:3478 over UDP gives nothing",
        "link          relayed, up after 1.0 s, round trip 80.1 ms (p95 81.2), loss 1.2% out, 0.0% in",
        "throughput    18.2 Mbit/s out, 17.9 Mbit/s in, 3 packets sent again",
        "other peer    peerllm 0.1.0",
        "event loop    stood still for 3 ms at the most",
        "GPU           cuda:0 T4, 15.0 GB of 16.0 GB free",
        "memory        8.0 GB of 16.0 GB free",
        "versions      peerllm 0.1.0",
        "daemon        away: the other peer is away",
        "",
        "Advice: Do this.",
    ]
    assert lines(report | {"advice": []})[-1] == "All is well."


def link_lines(**link: Any) -> list[str]:
    """What the report of a machine says of such a link."""
    report: dict[str, Any] = {
        "signaling": {"url": None, "error": None},
        "nat": {"kind": "unknown", "why_unknown": None, "addresses": []},
        "candidates": [],
        "relays": [],
        "link": {"path": "direct", "error": None, "seconds_to_up": 0.5, **link},
        "loop": {"worst_ms": 3.1, "blocked_count": 0},
        "machine": {"error": None},
        "versions": {},
        "daemon": None,
        "advice": [],
    }
    return [line for line in lines(report) if line.startswith(("link", "throughput", "other peer", "Prevents"))]


def test_what_was_measured_of_a_link_that_broke_is_shown() -> None:
    assert link_lines(error="gone", rtt_ms=80.0, loss_out=0.25, loss_in=0.0) == [
        "link          direct, up after 0.5 s, round trip 80.0 ms, loss 25.0% out, 0.0% in, and it broke"
    ]
    assert link_lines(error="gone") == ["link          direct, up after 0.5 s, and it broke"]
    assert link_lines(error="gone", path=None) == ["link          there is none"]


def test_who_opened_the_room_is_told_where_the_figures_are() -> None:
    assert link_lines(is_measured_there=True)[1] == "throughput    measured by the other side: its report has it"


def test_nothing_that_was_found_makes_lines_of_its_own() -> None:
    assert link_lines(other_release="9.9\nPrevents it: run rm")[1] == "other peer    peerllm 9.9 Prevents it: run rm"
