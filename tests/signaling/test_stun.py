"""The STUN responder: binding requests only, short answers, limited for each address."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aioice import stun
from peerllm_signaling import limits
from peerllm_signaling.server import SignalingServer
from peerllm_signaling.stun import StunResponder, binding_answer, is_binding_request, stun_budgets

ADDRESS = ("192.0.2.7", 40000)


def request(method: stun.Method = stun.Method.BINDING, kind: stun.Class = stun.Class.REQUEST) -> stun.Message:
    return stun.Message(message_method=method, message_class=kind)


@pytest.mark.parametrize(
    ("address", "length"),
    [(ADDRESS, 32), (("2001:db8::7", 40000, 0, 0), 44), (("::ffff:192.0.2.7", 40000, 0, 0), 32)],
)
def test_a_binding_request_is_answered_with_the_senders_address(address: tuple[Any, ...], length: int) -> None:
    asked = request()
    assert is_binding_request(bytes(asked))
    data = binding_answer(bytes(asked), address)
    assert len(data) == length <= 44
    answer = stun.parse_message(data)
    assert answer.transaction_id == asked.transaction_id
    assert answer.attributes["XOR-MAPPED-ADDRESS"] == (address[0].removeprefix("::ffff:"), 40000)


def test_the_answer_is_no_longer_when_the_request_is() -> None:
    asked = request()
    asked.attributes["SOFTWARE"] = "x" * 100
    asked.add_fingerprint()
    assert is_binding_request(bytes(asked))
    assert len(binding_answer(bytes(asked), ADDRESS)) == 32


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        bytes(20),
        b"\xff" * 20,
        b"x" * 300,
        bytes(request(kind=stun.Class.RESPONSE)),
        bytes(request(kind=stun.Class.INDICATION)),
        bytes(request(kind=stun.Class.ERROR)),
        bytes(request(method=stun.Method.ALLOCATE)),
        bytes(request())[:-1],
        bytes(request()) + b"\x00\x01\x00\xff",
        bytes(request()) + bytes(limits.MAX_STUN_REQUEST_BYTES),
        b"\x80" + bytes(request())[1:],  # TURN's channels and other protocols of the same port
        b"\x00\x01\x00\x03" + bytes(request())[4:] + b"abc",
        bytes(request())[:4] + b"\x21\x12\xa4\x43" + bytes(request())[8:],  # no cookie
    ],
    ids=lambda data: f"{len(data)} bytes",  # not the bytes themselves: they differ from run to run
)
def test_anything_else_is_not_answered(data: bytes) -> None:
    assert not is_binding_request(data)


class Sent:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.datagrams: list[bytes] = []

    def sendto(self, data: bytes, addr: Any = None) -> None:
        self.datagrams.append(data)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, responder: StunResponder) -> Sent:
    made = Sent()
    monkeypatch.setattr(responder, "_transport", made)
    return made


@pytest.fixture
def responder() -> StunResponder:
    return StunResponder(stun_budgets())


def test_answers_are_limited_for_each_address(responder: StunResponder, sent: Sent) -> None:
    for _ in range(limits.STUN_BURST + 20):
        responder.datagram_received(bytes(request()), ADDRESS)
    assert limits.STUN_BURST <= len(sent.datagrams) <= limits.STUN_BURST + 1
    responder.datagram_received(bytes(request()), ("192.0.2.8", 1))
    assert len(sent.datagrams) <= limits.STUN_BURST + 2


@pytest.mark.parametrize(
    "junk",
    [b"x" * 100, bytes(request(kind=stun.Class.INDICATION)), bytes(request())[:-1]],
    ids=["noise", "kind", "cut"],
)
def test_junk_takes_nothing_from_those_behind_the_same_address(
    responder: StunResponder, sent: Sent, junk: bytes
) -> None:
    for _ in range(limits.STUN_BURST * 4):
        responder.datagram_received(junk, ADDRESS)
    assert sent.datagrams == []
    for port in range(limits.STUN_BURST):
        responder.datagram_received(bytes(request()), (ADDRESS[0], port))
    assert len(sent.datagrams) == limits.STUN_BURST


async def test_both_ports_answer_over_the_network(server: SignalingServer) -> None:
    assert len(set(server.stun_ports)) == 2
    loop = asyncio.get_running_loop()
    for port in server.stun_ports:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.bind(("127.0.0.1", 0))
            await loop.sock_sendto(client, bytes(request()), ("127.0.0.1", port))
            async with asyncio.timeout(5):
                answer = stun.parse_message(await loop.sock_recv(client, 100))
            assert answer.attributes["XOR-MAPPED-ADDRESS"] == client.getsockname()
