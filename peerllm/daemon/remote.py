"""Requests that cross the link: a user of the peer that does not draft asks, and the drafting peer answers.

What was on its way when a connection broke is gone. The asking side then asks again for what is not finished, with the
characters that it has; the answering side keeps what it said until the request is over, and tells the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import structlog

from peerllm.daemon.channel import MessageChannel
from peerllm.protocol import limits
from peerllm.protocol.errors import Overloaded, PeerAway, PeerllmError, ProtocolError
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.messages import Message, Refusal, RequestCancel, RequestEvent, RequestOpen
from peerllm.protocol.requests import Event, Finished, GenerateRequest, TextDelta

log = structlog.get_logger(__name__)

Generate = Callable[[GenerateRequest], AsyncGenerator[Event, None]]

_KEPT_ANSWERS = 8
"""Finished ones, in case their end was lost with a connection."""


class _Asked:
    """One request that this side asked, and what came for it and was not taken yet: bounded, since the other side may
    send what it likes."""

    def __init__(self, body: GenerateRequest) -> None:
        self.body = body
        self.received = 0
        """Characters."""
        self.is_asked_again = False
        """Until the rest comes, what comes after a gap is dropped: it will come again."""
        self._queue: asyncio.Queue[RequestEvent | PeerllmError] = asyncio.Queue()
        self._bytes = 0

    def put(self, item: RequestEvent | PeerllmError) -> None:
        if isinstance(item, RequestEvent):
            if item.offset > self.received:
                if self.is_asked_again:
                    return
                item = ProtocolError("the other peer's answer has a gap")
            else:
                self.is_asked_again = False
                fresh = item.text[self.received - item.offset :]
                self.received += len(fresh)
                item = RequestEvent(request=item.request, offset=item.offset, text=fresh, finished=item.finished)
        self._bytes += _size(item)
        if self._bytes > limits.MAX_UNPROCESSED_BYTES:
            item = ProtocolError("the other peer sent more of an answer than its reader took")
        self._queue.put_nowait(item)

    async def get(self) -> RequestEvent | PeerllmError:
        item = await self._queue.get()
        self._bytes -= _size(item)
        return item


def _size(item: RequestEvent | PeerllmError) -> int:
    return limits.MESSAGE_OVERHEAD_BYTES + (4 * len(item.text) if isinstance(item, RequestEvent) else 0)


class RemoteRequests:
    """The asking side."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        # Not from 1 on: the other side may still hold requests of this peer's last process.
        self._numbers = itertools.count(secrets.randbits(48))
        self._open: dict[int, _Asked] = {}
        self._cancelled: deque[int] = deque(maxlen=limits.MAX_QUEUED_REQUESTS)

    def take(self, message: Message) -> None:
        if isinstance(message, RequestEvent):
            if asked := self._open.get(message.request):
                asked.put(message)
        elif (
            isinstance(message, Refusal) and message.request is not None and (asked := self._open.get(message.request))
        ):
            asked.put(message.error())

    def fail(self, error: PeerllmError) -> None:
        """Ends every request that waits."""
        for asked in self._open.values():
            asked.put(error)

    def ask_again(self) -> list[Message]:
        """What to send now that the link is up anew."""
        again: list[Message] = [RequestCancel(request=number) for number in self._cancelled]
        for number, asked in self._open.items():
            asked.is_asked_again = True
            again.append(RequestOpen(request=number, body=asked.body, offset=asked.received))
        return again

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """As Drafter.generate, made by the other peer."""
        if len(self._open) >= limits.MAX_QUEUED_REQUESTS:
            raise Overloaded(f"{len(self._open)} requests wait already; try again in a while")
        number = next(self._numbers)
        asked = self._open[number] = _Asked(request)
        is_over = False
        try:
            await self._channel.send(RequestOpen(request=number, body=request))
            while not is_over:
                item = await asked.get()
                if isinstance(item, PeerllmError):
                    is_over = not isinstance(item, ProtocolError)
                    raise item
                if item.text:
                    yield TextDelta(text=item.text)
                if item.finished is not None:
                    is_over = True
                    yield from_map(Finished, item.finished)
        finally:
            del self._open[number]
            if not is_over:
                await self._cancel(number)

    async def _cancel(self, number: int) -> None:
        self._cancelled.append(number)
        try:
            async with asyncio.timeout(5.0):
                await self._channel.send(RequestCancel(request=number))
        except (PeerAway, TimeoutError):
            log.info("request_cancel_not_sent")


class _Told:
    """One answer to the other side, as far as it was said."""

    def __init__(self, request: int) -> None:
        self.request = request
        self.text = ""
        self.end: Mapping[str, Any] | PeerllmError | None = None
        self.wanted: int | None = None
        """The character from which on the other side wants it again."""
        self.is_telling_again = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.order = asyncio.Lock()
        """What is told again and what is new go out one after the other."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="remote-answer")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


class RemoteAnswers:
    """The answering side: one task for each request of the other peer's users."""

    def __init__(self, channel: MessageChannel, generate: Generate) -> None:
        self._channel = channel
        self._generate = generate
        self._answers: OrderedDict[int, _Told] = OrderedDict()

    async def take(self, message: Message) -> None:
        if isinstance(message, RequestOpen):
            if told := self._answers.get(message.request):
                self._tell_again_soon(told, message.offset)
                return
            if sum(told.end is None for told in self._answers.values()) >= limits.MAX_QUEUED_REQUESTS:
                error = Overloaded("the other peer's queue is full; try again in a while")
                await self._channel.send(Refusal.of(error, request=message.request))
                return
            told = self._answers[message.request] = _Told(message.request)
            told.start(self._answer(told, message.body))
        elif isinstance(message, RequestCancel) and (told := self._answers.pop(message.request, None)):
            told.cancel()

    def forget(self) -> None:
        """Whoever asked is gone."""
        for told in self._answers.values():
            told.cancel()
        self._answers.clear()

    async def close(self) -> None:
        tasks = [task for told in self._answers.values() for task in told.tasks]
        self.forget()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, told: _Told, body: GenerateRequest) -> None:
        events = self._generate(body)
        try:
            async for event in events:
                async with told.order:
                    said = len(told.text)
                    if isinstance(event, TextDelta):
                        told.text += event.text
                    elif isinstance(event, Finished):
                        told.end = to_map(event)
                    await self._tell(told, said)
        except PeerllmError as error:
            async with told.order:
                told.end = error
                await self._tell(told, len(told.text))
        finally:
            await events.aclose()
            self._keep_few()

    def _tell_again_soon(self, told: _Told, offset: int) -> None:
        """One task for all the times that it is asked for; the last offset is what the other side has."""
        told.wanted = offset
        if not told.is_telling_again:
            told.is_telling_again = True
            told.start(self._tell_again(told))

    async def _tell_again(self, told: _Told) -> None:
        while told.wanted is not None:
            async with told.order:
                offset, told.wanted = told.wanted, None
                await self._tell(told, offset)
        told.is_telling_again = False

    async def _tell(self, told: _Told, offset: int) -> None:
        """What was said from character `offset` on, and the end if there is one."""
        finished = None if isinstance(told.end, PeerllmError) else told.end
        try:
            for start in range(offset, len(told.text), limits.MAX_TEXT_CHARS):
                piece = told.text[start : start + limits.MAX_TEXT_CHARS]
                await self._channel.send(RequestEvent(request=told.request, offset=start, text=piece))
            if finished is not None:
                await self._channel.send(RequestEvent(request=told.request, offset=len(told.text), finished=finished))
            if isinstance(told.end, PeerllmError):
                await self._channel.send(Refusal.of(told.end, request=told.request))
        except PeerAway:
            log.info("remote_answer_lost", request=told.request)

    def _keep_few(self) -> None:
        over = [number for number, told in self._answers.items() if told.end is not None]
        for number in over[:-_KEPT_ANSWERS]:
            del self._answers[number]
