"""What runs between two peers that agreed and loaded: drafting or verifying, and the requests of both peers' users."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from peerllm.daemon.answer import Workplace
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.drafter import Drafter
from peerllm.daemon.engine import Engine
from peerllm.daemon.remote import RemoteAnswers, RemoteRequests
from peerllm.daemon.request_queue import RequestQueue
from peerllm.daemon.setup import Agreed
from peerllm.daemon.verifier import Verifier
from peerllm.protocol.errors import PeerAway, PeerllmError
from peerllm.protocol.messages import Message
from peerllm.protocol.requests import Event, GenerateRequest

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
_VERIFIER_SESSIONS = 4


class Serving:
    """One side of the work, as drafting or as verifying peer. It outlives connections, and the other side's process as
    long as that comes back to the same agreement."""

    def __init__(
        self,
        agreed: Agreed,
        engine: Engine,
        channel: MessageChannel,
        spawn: Spawn,
        *,
        is_peer_ready: Callable[[], bool],
        draft_length: int | None,
    ) -> None:
        self.agreed = agreed
        self.queue = RequestQueue()
        self._channel = channel
        self._spawn = spawn
        self._judging: asyncio.Task[None] | None = None
        self._drafter: Drafter | None = None
        self._answers: RemoteAnswers | None = None
        self._verifier: Verifier | None = None
        self._requests: RemoteRequests | None = None
        if agreed.is_drafting:
            work = Workplace(engine, channel, agreed.boundary, is_peer_ready)
            self._drafter = Drafter(work, draft_length=draft_length)
            self._answers = RemoteAnswers(channel, self.generate)
        else:
            self._verifier = Verifier(engine, channel, agreed.boundary, max_sessions=_VERIFIER_SESSIONS)
            self._requests = RemoteRequests(channel)
            self._judging = spawn(self._verifier.run(), "verifier")

    @property
    def ledger(self) -> dict[str, Any] | None:
        return None if self._drafter is None else self._drafter.ledger.summary()

    async def take(self, message: Message) -> None:
        """A message of the other side's."""
        if self._drafter is not None and self._answers is not None:
            self._drafter.take(message)
            await self._answers.take(message)
        elif self._verifier is not None and self._requests is not None:
            self._requests.take(message)
            await self._verifier.take(message)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See api.Backend. Requests of both peers' users wait in one queue, at the drafting peer."""
        if self._requests is not None:
            source = self._requests.generate(request)
            async with contextlib.aclosing(source) as events:
                async for event in events:
                    yield event
            return
        async with self.queue.turn():
            if self._drafter is None:
                raise PeerAway("the other peer went away while the request waited")
            async with contextlib.aclosing(self._drafter.generate(request)) as events:
                async for event in events:
                    yield event

    def link_is_up_again(self) -> None:
        if self._drafter is not None:
            self._drafter.link_is_up_again()
        if self._requests is not None:
            self._spawn(self._say(self._requests.ask_again()), "ask-again")

    def engine_lost(self) -> None:
        """This side's caches are gone. What is being made goes on when the worker's successor has loaded: a drafting
        peer fills its own caches anew, a verifying peer asks for the rows."""
        if self._verifier is not None:
            self._verifier.caches_lost()

    def peer_restarted(self, error: PeerllmError) -> None:
        """The other side's process is new and knows of no request: what was asked of it ends, and what it asked."""
        if self._requests is not None:
            self._requests.fail(error)
        if self._answers is not None:
            self._answers.forget()

    async def _say(self, messages: list[Message]) -> None:
        with contextlib.suppress(PeerAway):
            for message in messages:
                await self._channel.send(message)

    async def close(self, error: PeerllmError) -> None:
        """Ends everything in the making with `error`."""
        if self._drafter is not None:
            self._drafter.fail(error)
        if self._requests is not None:
            self._requests.fail(error)
        if self._answers is not None:
            await self._answers.close()
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)
