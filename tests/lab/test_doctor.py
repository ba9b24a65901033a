"""`peerllm doctor` behind real NATs, with the real signaling server on a public host."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.lab.net import PUBLIC, Lab
from tests.lab.servers import start_signaling

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

SIGNALING = f"ws://{PUBLIC}:8080"
DOCTOR = ("-m", "peerllm.cli.main", "doctor", "--socket", "/nowhere/peerllm.sock", "--signaling", SIGNALING)
SECONDS = 200.0
"""None comes near it; a machine that is busy imports torch in half a minute."""


def begin(lab: Lab, host: str, *words: str) -> subprocess.Popen[str]:
    return lab.start(
        host, sys.executable, *DOCTOR, "--insecure", "--json", *words,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=SECONDS)
    return {**json.loads(said), "status": process.returncode}


def code_of(process: subprocess.Popen[str]) -> str:
    """The room code that a waiting doctor prints; it says so beside the JSON, which comes in the end."""
    if process.stderr is None:
        raise AssertionError("nothing to read the code from")
    for line in process.stderr:
        if line.startswith("Room code: "):
            return line.split()[-1]
    raise AssertionError("no code was printed")


@pytest.mark.parametrize("nats", [("none", "port-preserving"), ("symmetric", "udp-blocked")])
def test_the_kind_of_nat_is_told_with_what_it_means(nats: tuple[str, str]) -> None:
    with Lab(rtt_ms=40, nat=nats) as lab:
        start_signaling(lab)
        for (host, kind), process in [(pair, begin(lab, pair[0])) for pair in zip("ab", nats, strict=True)]:
            report = end(process)
            is_blocked = kind == "udp-blocked"
            assert report["nat"]["kind"] == kind
            assert report["works"] is not is_blocked  # there is no relay in this lab
            assert report["status"] == int(is_blocked)
            assert report["signaling"]["error"] is None
            assert report["signaling"]["round_trip_ms"] >= 19  # the public host is half way
            inside, outside = lab.hosts[host].address, lab.outside(host)
            assert report["nat"]["addresses"] == ([] if is_blocked else [{"local": inside, "seen": outside}])
            assert ("host", inside) in {(each["kind"], each["address"]) for each in report["candidates"]}
            advice = " ".join(each["text"] for each in report["advice"])
            assert ("another port" in advice) is (kind == "symmetric")
            assert ("no UDP out" in advice) is is_blocked


@pytest.mark.full
def test_a_network_without_a_way_to_the_server_ends_in_time_with_the_cause() -> None:
    with Lab(rtt_ms=20, nat=("port-preserving", "none")) as lab:
        start_signaling(lab)
        lab.cut("a")
        report = end(begin(lab, "a"))
    assert report["status"] == 1
    assert SIGNALING in report["signaling"]["error"]
    assert report["nat"]["kind"] == "unknown"


def test_two_machines_measure_what_the_wire_does_between_them() -> None:
    with Lab(rtt_ms=40, rate_mbit=8, buffer_ms=100, nat=("port-preserving", "none")) as lab:
        start_signaling(lab)
        waiting = begin(lab, "a", "--wait")
        lab.shape("b", loss=0.1)
        joining = begin(lab, "b", code_of(waiting))
        report, other = end(joining), end(waiting)
    assert report["status"] == other["status"] == 0
    assert report["nat"]["kind"] == "none"
    assert other["nat"]["kind"] == "port-preserving"
    link = report["link"]
    assert link["path"] == other["link"]["path"] == "direct"
    assert link["rtt_ms"] >= 39
    assert link["loss_out"] > 0.02  # a tenth of some 150 datagrams
    assert link["loss_in"] < link["loss_out"]
    assert link["mbit_in"] <= 8.5
    assert link["mbit_out"] <= 8.5
    assert link["mbit_in"] > 2
    assert any("datagrams out" in each["text"] for each in report["advice"])


@pytest.mark.full
def test_two_machines_without_a_path_are_told_why() -> None:
    with Lab(rtt_ms=20, nat=("symmetric", "symmetric")) as lab:
        start_signaling(lab)
        waiting = begin(lab, "a", "--wait")
        joining = begin(lab, "b", code_of(waiting))
        reports = [end(joining), end(waiting)]
    assert [each["status"] for each in reports] == [1, 1]
    for each in reports:
        assert "a relay is needed" in each["link"]["error"]
        assert each["link"]["error"] in [line["text"] for line in each["advice"] if line["prevents"]]
