"""A STUN responder (RFC 8489): binding requests on UDP, nothing else. An answer has 32 bytes (IPv6: 44)."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any, cast

from aioice import stun

from peerllm_signaling import limits
from peerllm_signaling.budgets import Buckets, address_group

_HEADER = struct.Struct("!HHI12s")
"""Method and class, length of the attributes, magic cookie, transaction."""


class StunResponder(asyncio.DatagramProtocol):
    """Tells a sender the address that its datagram came from.

    Sources can be forged: an answer is at most 44 bytes for a request of 20, and limited for each address.
    """

    def __init__(self, budgets: Buckets) -> None:
        self._budgets = budgets
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own, before Python 3.12, is no subclass of DatagramTransport.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        # Only what is answered takes from the budget: those behind one NAT share it, and junk is not theirs to pay for.
        if self._transport is None or not is_binding_request(data):
            return
        if self._budgets.take(address_group(addr[0]), time.monotonic()):
            self._transport.sendto(binding_answer(data, addr), addr)

    def error_received(self, exc: Exception) -> None:
        """An ICMP error for an earlier answer: nothing to do about it."""


def is_binding_request(data: bytes) -> bool:
    """By the header alone: no attribute changes the answer, and a stranger's bytes are worth no more work than that."""
    if not _HEADER.size <= len(data) <= limits.MAX_STUN_REQUEST_BYTES:
        return False
    kind, length, cookie, _ = _HEADER.unpack_from(data)
    return bool(
        kind == stun.Method.BINDING | stun.Class.REQUEST
        and length == len(data) - _HEADER.size
        and length % 4 == 0
        and cookie == stun.COOKIE
    )


def binding_answer(data: bytes, addr: tuple[Any, ...]) -> bytes:
    """The answer to a binding request, as `is_binding_request` knows it."""
    host = addr[0].partition("%")[0]
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    answer = stun.Message(
        message_method=stun.Method.BINDING,
        message_class=stun.Class.RESPONSE,
        transaction_id=_HEADER.unpack_from(data)[3],
    )
    answer.attributes["XOR-MAPPED-ADDRESS"] = (host, addr[1])
    return bytes(answer)


def stun_budgets() -> Buckets:
    return Buckets(60 * limits.STUN_PER_SECOND, limits.STUN_BURST, limits.MAX_ADDRESSES)
