"""Typed messages over a link: encoding, decoding, and what happens to a message that is wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from peerllm.link import Link, Urgency
from peerllm.protocol.errors import PeerllmError, ProtocolError
from peerllm.protocol.messages import (
    Message,
    PrefillChunk,
    Refusal,
    RequestEvent,
    UnknownMessage,
    decode_message,
    encode_message,
)

log = structlog.get_logger(__name__)

_URGENCY: dict[type[Message], Urgency] = {PrefillChunk: Urgency.BULK, RequestEvent: Urgency.ANSWER}


class MessageChannel:
    """One link, in messages."""

    def __init__(self, link: Link) -> None:
        self.link = link

    async def send(self, message: Message, urgency: Urgency | None = None) -> None:
        """Waits while too much is unprocessed or the link is away. Raises PeerAway once it is down for good.

        Order holds within an urgency alone; without one, the message's kind decides.
        """
        if urgency is None:
            urgency = _URGENCY.get(type(message), Urgency.ROUND)
        await self.link.send(encode_message(message), urgency)

    async def receive(self) -> Message:
        """The next message that this release knows. What is not a message is answered and skipped.

        Raises:
            PeerAway: the link is down for good.
        """
        while True:
            data = await self.link.receive()
            try:
                return decode_message(data)
            except UnknownMessage as error:
                log.info("unknown_message", reason=error.message)
                await self._refuse(error)
            except ProtocolError as error:
                log.warning("bad_message", reason=error.message, bytes=len(data))
                await self._refuse(error)

    async def _refuse(self, error: PeerllmError) -> None:
        await self.send(Refusal.of(error))

    async def run(self, handle: Callable[[Message], Awaitable[None]]) -> None:
        """Hands every message to `handle` until the link is down for good; PeerAway then ends it."""
        while True:
            await handle(await self.receive())
