"""Requests that cross the link: a user of the peer that does not draft asks, and the drafting peer answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

import structlog

from peerllm.daemon.channel import MessageChannel
from peerllm.protocol import limits
from peerllm.protocol.errors import Overloaded, PeerAway, PeerllmError, ProtocolError
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.messages import Message, Refusal, RequestCancel, RequestEvent, RequestOpen
from peerllm.protocol.requests import Event, Finished, GenerateRequest, TextDelta

log = structlog.get_logger(__name__)

Generate = Callable[[GenerateRequest], AsyncGenerator[Event, None]]


class _Inbox:
    """What came for one request and was not taken yet; bounded, since the other side may send what it likes."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[RequestEvent | PeerllmError] = asyncio.Queue()
        self._bytes = 0

    def put(self, item: RequestEvent | PeerllmError) -> None:
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
        self._numbers = itertools.count(1)
        self._open: dict[int, _Inbox] = {}

    def take(self, message: Message) -> None:
        if isinstance(message, RequestEvent):
            if inbox := self._open.get(message.request):
                inbox.put(message)
        elif (
            isinstance(message, Refusal) and message.request is not None and (inbox := self._open.get(message.request))
        ):
            inbox.put(message.error())

    def fail(self, error: PeerllmError) -> None:
        """Ends every request that waits."""
        for inbox in self._open.values():
            inbox.put(error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """As Drafter.generate, made by the other peer."""
        if len(self._open) >= limits.MAX_QUEUED_REQUESTS:
            raise Overloaded(f"{len(self._open)} requests wait already; try again in a while")
        number = next(self._numbers)
        inbox = self._open[number] = _Inbox()
        is_over = False
        shown = 0
        try:
            await self._channel.send(RequestOpen(request=number, body=request))
            while not is_over:
                item = await inbox.get()
                if isinstance(item, PeerllmError):
                    is_over = not isinstance(item, ProtocolError)
                    raise item
                if item.offset != shown:
                    raise ProtocolError("the other peer's answer has a gap")
                if item.text:
                    shown += len(item.text)
                    yield TextDelta(text=item.text)
                if item.finished is not None:
                    is_over = True
                    yield from_map(Finished, item.finished)
        finally:
            del self._open[number]
            if not is_over:
                await self._cancel(number)

    async def _cancel(self, number: int) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self._channel.send(RequestCancel(request=number))
        except (PeerAway, TimeoutError):
            log.info("request_cancel_not_sent")


class RemoteAnswers:
    """The answering side: one task for each request of the other peer's users."""

    def __init__(self, channel: MessageChannel, generate: Generate) -> None:
        self._channel = channel
        self._generate = generate
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def take(self, message: Message) -> None:
        if isinstance(message, RequestOpen):
            if message.request in self._tasks:
                return  # the same request again
            if len(self._tasks) >= limits.MAX_QUEUED_REQUESTS:
                error = Overloaded("the other peer's queue is full; try again in a while")
                await self._channel.send(Refusal.of(error, request=message.request))
                return
            task = asyncio.create_task(self._answer(message), name="remote-answer")
            self._tasks[message.request] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.request, None))
        elif isinstance(message, RequestCancel) and (task_or_none := self._tasks.get(message.request)):
            task_or_none.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, message: RequestOpen) -> None:
        events = self._generate(message.body)
        offset = 0
        try:
            async for event in events:
                text = event.text if isinstance(event, TextDelta) else ""
                finished = to_map(event) if isinstance(event, Finished) else None
                await self._channel.send(
                    RequestEvent(request=message.request, offset=offset, text=text, finished=finished)
                )
                offset += len(text)
        except PeerllmError as error:
            try:
                await self._channel.send(Refusal.of(error, request=message.request))
            except PeerAway:
                log.info("remote_answer_lost", error=error.code)
        finally:
            await events.aclose()
