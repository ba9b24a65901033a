"""A STUN responder (RFC 8489): binding requests on UDP, nothing else. An answer has 32 bytes (IPv6: 44)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from aioice import stun

from peerllm_signaling import limits
from peerllm_signaling.budgets import Buckets, address_group

_HEADER_BYTES = 20


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
        if self._transport is None or not self._budgets.take(address_group(addr[0]), time.monotonic()):
            return
        answer = binding_answer(data, addr)
        if answer is not None:
            self._transport.sendto(answer, addr)

    def error_received(self, exc: Exception) -> None:
        """An ICMP error for an earlier answer: nothing to do about it."""


def binding_answer(data: bytes, addr: tuple[Any, ...]) -> bytes | None:
    """The answer, or None for anything but a well-formed binding request."""
    if not _HEADER_BYTES <= len(data) <= limits.MAX_STUN_REQUEST_BYTES or data[0] & 0xC0:
        return None
    try:
        request = stun.parse_message(data)
    except Exception:  # the parser is a library's, the bytes are a stranger's: whatever it raises means the same
        return None
    if request.message_method != stun.Method.BINDING or request.message_class != stun.Class.REQUEST:
        return None
    host = addr[0].partition("%")[0]
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    answer = stun.Message(
        message_method=stun.Method.BINDING,
        message_class=stun.Class.RESPONSE,
        transaction_id=request.transaction_id,
    )
    answer.attributes["XOR-MAPPED-ADDRESS"] = (host, addr[1])
    return bytes(answer)


def stun_budgets() -> Buckets:
    return Buckets(60 * limits.STUN_PER_SECOND, limits.STUN_BURST, limits.MAX_ADDRESSES)
