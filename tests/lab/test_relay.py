"""Debian's coturn with docs/turnserver.conf: over TLS with an authority of one's own, and with credentials that end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.authority import make_certificate
from tests.lab.net import PUBLIC, Lab
from tests.lab.peers import PeerFailed, Peers
from tests.lab.servers import relay, start_signaling, turn_options

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

CREDENTIALS_SECONDS = 6.0


@pytest.mark.parametrize("is_trusted", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_relay_over_tls_is_used_by_who_trusts_its_authority_and_by_nobody_else(
    is_trusted: bool, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path / "tls", PUBLIC)
    nat = ("udp-blocked", "udp-blocked")
    with Lab(rtt_ms=40, nat=nat) as lab, relay(lab, tmp_path, certificate=certificate) as turn:
        over_tls = [server for server in turn if server["transport"] == "tls"]
        trusting = {"SSL_CERT_FILE": str(certificate.authority)} if is_trusted else {}
        peers = Peers(lab, left={"turn": over_tls}, environment=trusting)
        if not is_trusted:
            with pytest.raises(PeerFailed, match="relay"):
                peers.start()
            return
        assert {each["path"] for each in peers.start()} == {"relayed"}
        peers.right.do("serve")
        assert peers.left.ask("measure", sizes=[64_000], samples=2)["blocks"]


def test_everything_over_tls_alone_is_found_well_by_the_doctor(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "tls", PUBLIC)
    urls = [f"turns:{PUBLIC}:5349?transport=tcp", f"turn:{PUBLIC}:3478?transport=udp"]
    with Lab(rtt_ms=20, nat=("udp-blocked", "none")) as lab, relay(lab, tmp_path, certificate=certificate):
        start_signaling(lab, *turn_options(tmp_path, *urls), certificate=certificate)
        report = doctor(lab, {"SSL_CERT_FILE": str(certificate.authority)})
        assert [(each["transport"], each["answers"]) for each in report["relays"]] == [("tls", True), ("udp", False)]
        assert report["nat"]["kind"] == "udp-blocked"
        assert report["works"] is True
        assert [each["kind"] for each in report["candidates"]] == ["host", "relay"]
        distrusting = doctor(lab, {})
    assert "certificate" in distrusting["signaling"]["error"]
    assert distrusting["works"] is False


def doctor(lab: Lab, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        lab.argv(
            *("a", sys.executable, "-m", "peerllm.cli.main", "doctor", "--json"),
            *("--socket", "/nowhere/peerllm.sock", "--signaling", f"wss://{PUBLIC}:8080"),
        ),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return dict(json.loads(done.stdout))


def test_credentials_are_renewed_before_the_relay_refuses_the_old_ones(tmp_path: Path) -> None:
    with Lab(rtt_ms=20) as lab, relay(lab, tmp_path):
        url = f"turn:{PUBLIC}:3478?transport=udp"
        start_signaling(lab, *turn_options(tmp_path, url), turn_seconds=CREDENTIALS_SECONDS)
        done = subprocess.run(
            lab.argv("a", sys.executable, "-m", "tests.lab.renewing", f"ws://{PUBLIC}:8080", str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "path": "relayed",
        "granted_at_first": True,
        "renewed_before_the_end": True,
        "granted_after_the_end": False,
        "granted_anew": True,
        "carries_after_the_end": True,
        "keeps_its_allocation": True,
        "path_anew": "relayed",
        "carries_anew": True,
    }


@pytest.mark.full
def test_a_relayed_path_that_takes_seconds_to_make_is_made_again_after_a_cut(tmp_path: Path) -> None:
    with Lab(rtt_ms=500, nat=("udp-blocked", "udp-blocked")) as lab, relay(lab, tmp_path) as turn:
        peers = Peers(lab, left={"turn": turn})
        peers.start(30)
        lab.cut("a")
        time.sleep(12.0)  # beyond DOWN_SECONDS
        lab.restore("a")
        for each in (peers.left, peers.right):
            each.wait_state("up", epoch_above=1)
