"""What two links say through the room: validated field by field."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerllm.link import hello
from peerllm.link.signaling import (
    BeginAgain,
    Candidate,
    Description,
    MoreCandidates,
    StaleEpoch,
    decode_body,
    encode_body,
)
from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import ProtocolError

HOST = {"address": "192.0.2.1", "port": 5000, "kind": "host", "priority": 1, "foundation": "f"}


def candidate(**changes: Any) -> Candidate:
    return Candidate(**{**HOST, **changes})


def description(**changes: Any) -> Description:
    values = {
        "username": "user",
        "password": "p" * 22,
        "fingerprint": bytes(32),
        "sctp_port": 5000,
        "max_message_bytes": 65536,
        "candidates": (candidate(),),
    }
    return Description(**{**values, **changes})


@pytest.mark.parametrize(
    "body",
    [
        description(),
        MoreCandidates(candidates=(candidate(kind="relay"),), last=True),
        StaleEpoch(epoch=7),
        BeginAgain(),
    ],
)
def test_a_body_comes_back_as_it_went(body: Any) -> None:
    assert decode_body(encode_body(body)) == body


@pytest.mark.parametrize(
    "change",
    [
        {"address": "peer.example.org"},
        {"address": "peer.local"},
        {"address": "1.2.3"},
        {"address": 17},
        {"port": 0},
        {"port": 65536},
        {"kind": "prflx"},
        {"priority": 0},
        {"foundation": "a b"},
        {"foundation": ""},
    ],
)
def test_a_candidate_that_is_no_ip_literal_or_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    wire = cbor.encode({"k": "candidates", "candidates": [{**HOST, **change}]})
    with pytest.raises(ProtocolError):
        decode_body(wire)


@pytest.mark.parametrize(
    "change",
    [{"username": "abc"}, {"username": "a:bc"}, {"password": "short"}, {"fingerprint": bytes(31)}, {"sctp_port": 0}],
)
def test_a_description_that_is_wrong_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_body(encode_body(description(**change)))


def test_too_many_candidates_are_refused() -> None:
    wire = cbor.encode({"k": "candidates", "candidates": [HOST] * (limits.MAX_REMOTE_CANDIDATES + 1)})
    with pytest.raises(ProtocolError):
        decode_body(wire)


@pytest.mark.parametrize(
    "address", ["224.0.0.1", "0.0.0.0", "255.255.255.255", "169.254.1.1", "fe80::1", "ff02::1", "::", "::ffff:10.0.0.1"]
)
def test_addresses_that_no_peer_has_are_passed_over(address: str) -> None:
    assert not candidate(address=address).is_usable(loopback=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_used_only_where_it_is_set(address: str) -> None:
    assert candidate(address=address).is_usable(loopback=True)
    assert not candidate(address=address).is_usable(loopback=False)


@pytest.mark.parametrize("address", ["10.0.0.1", "203.0.113.9", "2001:db8::1"])
def test_ordinary_addresses_are_used(address: str) -> None:
    assert candidate(address=address).is_usable(loopback=False)


def test_a_kind_of_a_later_release_is_passed_over() -> None:
    assert decode_body(cbor.encode({"k": "weather", "rain": True})) is None


@given(st.binary(max_size=300))
def test_any_bytes_give_a_body_or_a_protocol_error(wire: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_body(wire)


def test_a_hello_is_padded_to_a_full_packet_and_comes_back() -> None:
    wire = hello.encode_hello(b"body")
    assert len(wire) == limits.MIN_HELLO_BYTES
    assert hello.decode_hello(wire) == b"body"
    assert hello.decode_hello(hello.encode_hello(bytes(limits.MAX_HELLO_BYTES))) == bytes(limits.MAX_HELLO_BYTES)


@pytest.mark.parametrize("wire", [b"", b"\0\0\0", b"\0\0\0\5abc", b"\xff\xff\xff\xff" + bytes(2000)])
def test_a_hello_whose_length_is_wrong_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        hello.decode_hello(wire)


def test_the_mac_depends_on_everything() -> None:
    base: dict[str, Any] = {
        "from_controlling": True,
        "epoch": 1,
        "controlling_fingerprint": b"a" * 32,
        "controlled_fingerprint": b"b" * 32,
        "controlling_body": b"one",
        "controlled_body": b"two",
    }
    changes: list[dict[str, Any]] = [
        {},
        {"from_controlling": False},
        {"epoch": 2},
        {"controlling_fingerprint": b"c" * 32},
        {"controlled_fingerprint": b"c" * 32},
        {"controlling_body": b"onet", "controlled_body": b"wo"},
        {"controlled_body": b"twa"},
    ]
    macs = {hello.mac(b"k" * 32, **{**base, **change}) for change in changes}
    macs.add(hello.mac(b"K" * 32, **base))
    assert len(macs) == len(changes) + 1
