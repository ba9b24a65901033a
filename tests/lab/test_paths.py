"""Through the NATs that people have: which path, and how soon; and clear words where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.net import Lab
from tests.lab.peers import PeerFailed, Peers
from tests.lab.servers import STUN, relay, start_signaling

pytestmark = pytest.mark.root

BEHIND_A_NAT = ("port-preserving", "symmetric", "udp-blocked")
MATRIX = [
    *((left, right) for left in BEHIND_A_NAT for right in BEHIND_A_NAT),
    ("none", "symmetric"),
    pytest.param("symmetric", "none", marks=pytest.mark.full),
]
"""Both orders: the left side controls ICE, and with one of them the other's check comes first."""


def expected_path(left: str, right: str) -> str:
    """A symmetric NAT meets whoever lets it in: a host without a NAT. Two that keep their ports let each other in."""
    pair = {left, right}
    return "direct" if "none" in pair or pair == {"port-preserving"} else "relayed"


def exchange(peers: Peers) -> None:
    """A block of 64 KB passes in both directions."""
    peers.right.do("serve")
    found = peers.left.ask("measure", sizes=[64_000], samples=2)
    assert [block["bytes"] for block in found["blocks"]] == [64_000, 64_000]


@pytest.mark.parametrize(("left", "right"), MATRIX)
def test_a_pair_behind_nats_connects_direct_where_it_can_and_relayed_where_it_must(
    left: str, right: str, tmp_path: Path
) -> None:
    with Lab(rtt_ms=40, nat=(left, right)) as lab, relay(lab, tmp_path) as turn:
        start_signaling(lab)
        peers = Peers(lab, left={"stun": STUN, "turn": turn})
        started = peers.start()
        took = max(each["seconds"] for each in started)
        print(f"{left} – {right}: {started[0]['path']}, UP after {took:.2f} s")
        assert {each["path"] for each in started} == {expected_path(left, right)}
        assert took < 8
        exchange(peers)
        assert max(peers.close()) < 2


def test_two_symmetric_nats_without_a_relay_are_told_so_in_time() -> None:
    with Lab(rtt_ms=40, nat=("symmetric", "symmetric")) as lab:
        start_signaling(lab)
        peers = Peers(lab, left={"stun": STUN})
        with pytest.raises(PeerFailed, match="relay") as caught:
            peers.start(seconds=15)
        assert caught.value.code == "no_path"


def test_two_peers_on_one_network_connect_at_once_though_stun_and_turn_are_dead() -> None:
    dead = {"host": "203.0.113.77", "port": 3478, "username": "u", "credential": "c", "transport": "udp"}
    with Lab(rtt_ms=4) as lab:
        peers = Peers(lab, left={"stun": [["203.0.113.77", 3478]], "turn": [dead]})
        started = peers.start()
        assert {each["path"] for each in started} == {"direct"}
        assert max(each["seconds"] for each in started) < 2
        assert max(peers.close()) < 2


def test_hosts_with_ipv6_alone_connect() -> None:
    with Lab(rtt_ms=20, ipv6="only") as lab:
        peers = Peers(lab)
        assert {each["path"] for each in peers.start()} == {"direct"}
        exchange(peers)


@pytest.mark.parametrize("mtu", [pytest.param(1_280, marks=pytest.mark.full), 1_200])
def test_a_path_with_a_small_mtu_and_no_word_of_it_carries_blocks(mtu: int) -> None:
    with Lab(rtt_ms=20) as lab:
        for port in ("a", "b"):
            lab.shape(port, mtu=mtu)
        peers = Peers(lab)
        peers.start()
        exchange(peers)


def test_a_relayed_pair_moves_to_a_direct_path_when_there_is_one(tmp_path: Path) -> None:
    nat = ("port-preserving", "port-preserving")
    with Lab(rtt_ms=40, nat=nat) as lab, relay(lab, tmp_path) as turn:
        start_signaling(lab)
        for host, other in (("a", "b"), ("b", "a")):
            lab.block_udp(host, lab.outside(other))
        peers = Peers(lab, left={"stun": STUN, "turn": turn, "direct_retry_seconds": 2.0})
        assert {each["path"] for each in peers.start()} == {"relayed"}
        for host in ("a", "b"):
            lab.unblock_udp(host)
        for each in (peers.left, peers.right):
            each.wait_state("up", epoch_above=1)
            assert each.ask("stats")["path"] == "direct"
        exchange(peers)
