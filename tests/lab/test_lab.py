"""The lab itself: does its network do what it says?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.net import ROOT, Lab, missing

pytestmark = pytest.mark.root


def test_the_lab_has_the_round_trip_that_was_asked_for_and_leaves_nothing_behind() -> None:
    with Lab(rtt_ms=60) as lab:
        assert lab.ping_ms(3) >= 59.5
        names = [host.namespace for host in lab.hosts.values()]
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in listed for name in names)


def test_two_labs_at_once_are_two_networks() -> None:
    with Lab(rtt_ms=4) as one:
        with Lab(rtt_ms=4) as other:
            other.cut("a")
            assert one.ping_ms(2) > 0
        # The other's end took nothing of this one's along, and neither would that of another process.
        done = subprocess.run(
            [sys.executable, "-c", "from tests.lab.net import Lab\nwith Lab(rtt_ms=4): pass"], cwd=ROOT, check=False
        )
        assert done.returncode == 0
        assert one.ping_ms(2) > 0


def test_a_cut_port_carries_nothing_until_it_is_restored() -> None:
    with Lab(rtt_ms=4) as lab:
        ping = lab.argv("a", "ping", "-q", "-c", "1", "-W", "1", lab.hosts["b"].address)
        assert subprocess.run(ping, capture_output=True, check=False).returncode == 0
        lab.cut("b")
        assert subprocess.run(ping, capture_output=True, check=False).returncode != 0
        lab.restore("b")
        assert subprocess.run(ping, capture_output=True, check=False).returncode == 0


def test_a_path_carries_no_packet_longer_than_its_mtu() -> None:
    with Lab(rtt_ms=4) as lab:
        lab.shape("a", mtu=1_200)
        for payload, passes in ((1_172, True), (1_173, False)):
            ping = lab.argv("a", *f"ping -q -c 1 -W 1 -M do -s {payload}".split(), lab.hosts["b"].address)
            assert (subprocess.run(ping, capture_output=True, check=False).returncode == 0) is passes


def test_a_nat_hides_its_host_and_lets_it_out() -> None:
    with Lab(rtt_ms=4, nat=("symmetric", "none")) as lab:
        assert lab.hosts["a"].address.startswith("10.")
        out = lab.argv("a", "ping", "-q", "-c", "1", "-W", "1", lab.hosts["b"].address)
        into = lab.argv("b", "ping", "-q", "-c", "1", "-W", "1", lab.hosts["a"].address)
        assert subprocess.run(out, capture_output=True, check=False).returncode == 0
        assert subprocess.run(into, capture_output=True, check=False).returncode != 0


def test_the_reason_for_no_lab_is_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert missing() == "the lab makes network namespaces, which needs root"
