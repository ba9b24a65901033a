"""A line for each thing that is not well, and none where all is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from peerllm.daemon.advice import Advice, advice

WELL: dict[str, Any] = {
    "release": "0.1.0",
    "signaling": {"url": "wss://example.org", "connect_ms": 80.0, "round_trip_ms": 40.0, "error": None},
    "nat": {"kind": "port-preserving", "why_unknown": None, "addresses": []},
    "candidates": [],
    "relays": [],
    "link": None,
    "loop": {"worst_ms": 4.0, "blocked_count": 0},
    "machine": {
        "torch": "2.13.0",
        "devices": [
            {"device": "cuda:0", "name": "GPU", "free_bytes": 15 << 30, "total_bytes": 16 << 30},
            {"device": "cpu", "name": "CPU", "free_bytes": 30 << 30, "total_bytes": 32 << 30},
        ],
        "error": None,
    },
    "versions": {},
    "daemon": None,
}
LINK: dict[str, Any] = {
    "path": "direct",
    "error": None,
    "seconds_to_up": 0.4,
    "other_release": "0.1.0",
    "rtt_ms": 80.0,
    "loss_out": 0.0,
    "loss_in": 0.0,
    "mbit_out": 40.0,
    "mbit_in": 40.0,
}
RELAY = {"host": "relay.example.org", "port": 3478, "transport": "udp", "answers": True, "ms": 40.0}


def given(**changes: Any) -> list[Advice]:
    """The advice on a report that is well but for `changes`; `link__loss_out=0.1` changes one value in a part."""
    report = copy.deepcopy(WELL)
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            report[part] = {**(report[part] or LINK), key: value}
        else:
            report[part] = value
    return advice(report)


def test_nothing_is_said_where_all_is_well() -> None:
    assert given() == []
    assert given(link=LINK, relays=[RELAY], daemon={"state": "ready", "well": True, "cause": "", "loop": None}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signaling__url": None}, "No signaling server is named"),
        ({"signaling__error": "The server cannot be reached."}, "The server cannot be reached."),
        ({"nat__kind": "udp-blocked"}, "no relay answers"),
        ({"nat__kind": "udp-blocked", "relays": [{**RELAY, "answers": False}]}, "no relay answers"),
        ({"link__error": "No network path to the other peer was found."}, "No network path"),
        ({"machine__error": "torch is not there"}, "torch is not there"),
    ],
    ids=str,
)
def test_what_prevents_it_is_said_first(changes: dict[str, Any], words: str) -> None:
    found = given(**changes, loop={"worst_ms": 900.0, "blocked_count": 3})
    assert words in found[0].text
    assert [each.prevents for each in found] == [True, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signaling__connect_ms": 4000.0}, "4.0 s to reach"),
        ({"nat__kind": "udp-blocked", "relays": [RELAY]}, "through the relay"),
        ({"nat__kind": "udp-blocked", "link": {**LINK, "path": "direct"}}, "lets no UDP out"),
        ({"nat__kind": "symmetric"}, "by no way"),
        ({"nat__kind": "symmetric", "relays": [RELAY]}, "through the relay alone"),
        ({"nat": {"kind": "unknown", "why_unknown": "the signaling server offers no STUN"}}, "--no-stun"),
        (
            {"nat": {"kind": "unknown", "why_unknown": "only one STUN port of the signaling server answers"}},
            "two STUN ports",
        ),
        ({"relays": [{**RELAY, "answers": False}]}, "relay.example.org:3478 gives nothing over UDP"),
        ({"relays": [{**RELAY, "answers": False, "transport": "tls"}]}, "certificate"),
        ({"link__path": "relayed"}, "detour"),
        ({"link__loss_out": 0.03}, "3.0% of the datagrams out"),
        ({"link__loss_in": 0.02}, "2.0% of those in"),
        ({"link__mbit_out": 0.8}, "0.8 Mbit/s out"),
        ({"link__mbit_in": 1.4}, "1.4 Mbit/s in"),
        ({"link__other_release": "0.2.0"}, "update the older"),
        ({"loop__worst_ms": 450.0}, "450 ms"),
        ({"daemon": {"well": True, "loop": {"worst_ms": 700.0}}}, "in the daemon that runs"),
        ({"daemon": {"well": False, "cause": "the other peer is away", "loop": None}}, "the other peer is away"),
        ({"machine__devices": WELL["machine"]["devices"][1:]}, "finds no GPU"),
        (
            {"machine__devices": [{"device": "cuda:0", "name": "G", "free_bytes": 1 << 30, "total_bytes": 16 << 30}]},
            "1.1 of 17.2 GB free",
        ),
    ],
    ids=str,
)
def test_each_thing_that_is_not_well_has_its_line(changes: dict[str, Any], words: str) -> None:
    (found,) = given(**changes)
    assert words in found.text
    assert not found.prevents
    assert "\n" not in found.text


def test_little_memory_is_said() -> None:
    devices = [WELL["machine"]["devices"][0], {**WELL["machine"]["devices"][1], "free_bytes": 1 << 30}]
    (found,) = given(machine__devices=devices)
    assert "1.1 GB of memory" in found.text


def test_where_the_server_is_not_reached_the_link_is_not_blamed_too() -> None:
    assert (
        len(given(signaling__error="The server cannot be reached.", link__error="The server cannot be reached.")) == 1
    )


def test_a_link_that_waited_for_the_other_side_to_measure_is_judged_by_what_it_knows() -> None:
    assert (
        given(link={"path": "direct", "error": None, "seconds_to_up": 0.4, "other_release": None, "rtt_ms": 80.0}) == []
    )


def test_an_error_of_the_link_is_a_sentence() -> None:
    (found,) = given(link__error="the other peer did not come back in time")
    assert found == Advice("The other peer did not come back in time.", prevents=True)
    (found,) = given(link__error="Is it there?")
    assert found.text == "Is it there?"


@pytest.mark.parametrize(("count", "words"), [(1, "anew once"), (2, "anew 2 times")])
def test_a_connection_that_was_replaced_is_said(count: int, words: str) -> None:
    (found,) = given(link__replaced=count)
    assert words in found.text
    assert not found.prevents
