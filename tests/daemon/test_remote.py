"""Requests across a link whose connections break: what was on its way is lost, and no character of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from peerllm.daemon.remote import RemoteAnswers, RemoteRequests
from peerllm.protocol.errors import EngineError, PeerAway, PeerllmError, ProtocolError
from peerllm.protocol.messages import Message, RequestCancel, RequestEvent, RequestOpen, decode_message, encode_message
from peerllm.protocol.requests import Event, Finished, GenerateRequest, TextDelta, Usage

PIECES = [f"piece {number}, " for number in range(40)]
REQUEST = GenerateRequest(prompt="the tide", max_tokens=40)
SECONDS = 10


class Channel:
    """Passes messages on as the link does, encoded; while it is `broken` it takes them and loses them."""

    def __init__(self) -> None:
        self.is_broken = False
        self.seen: list[Message] = []
        self.lost: list[Message] = []
        self.deliver: Callable[[Message], Awaitable[None]]

    async def send(self, message: Message) -> None:
        message = decode_message(encode_message(message))
        await asyncio.sleep(0)
        if self.is_broken:
            self.lost.append(message)
            return
        self.seen.append(message)
        await self.deliver(message)


class Pair:
    """An asking and an answering side."""

    def __init__(self, generate: Callable[[GenerateRequest], AsyncGenerator[Event, None]]) -> None:
        self.there, self.back = Channel(), Channel()
        self.requests = RemoteRequests(self.there)  # type: ignore[arg-type]
        self.answers = RemoteAnswers(self.back, generate)  # type: ignore[arg-type]
        self.there.deliver = self.answers.take
        self.back.deliver = self._take

    async def _take(self, message: Message) -> None:
        self.requests.take(message)

    def break_link(self) -> None:
        self.there.is_broken = self.back.is_broken = True

    async def mend(self) -> None:
        self.there.is_broken = self.back.is_broken = False
        for message in self.requests.ask_again():
            await self.there.send(message)


def finished() -> Finished:
    return Finished(reason="stop", usage=Usage(prompt_tokens=2, completion_tokens=len(PIECES)), ledger={})


class Made:
    """An answer that is made piece by piece, as fast as `steps` are given."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)
        self.made = 0
        self.was_closed = False
        self.error: PeerllmError | None = None

    def give(self, steps: int) -> None:
        for _ in range(steps):
            self.steps.release()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        try:
            for piece in PIECES:
                await self.steps.acquire()
                self.made += 1
                yield TextDelta(text=piece)
            await self.steps.acquire()
            if self.error is not None:
                raise self.error
            yield finished()
        finally:
            self.was_closed = True


@pytest.fixture
async def made() -> Made:
    return Made()


@pytest.fixture
async def pair(made: Made) -> AsyncIterator[Pair]:
    pair = Pair(made.generate)
    yield pair
    await pair.answers.close()


async def read(events: AsyncGenerator[Event, None]) -> tuple[str, Finished | None]:
    text, end = "", None
    async for event in events:
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            end = event
    return text, end


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def said(channel: Channel) -> int:
    return sum(isinstance(message, RequestEvent) for message in [*channel.seen, *channel.lost])


@pytest.mark.parametrize("before", [0, 1, 17, 40])
@pytest.mark.parametrize("lost", [0, 1, 5, 41])
async def test_an_answer_comes_whole_though_a_part_was_lost(pair: Pair, made: Made, before: int, lost: int) -> None:
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    made.give(before)
    await until(lambda: pair.there.seen and said(pair.back) == before)
    pair.break_link()
    made.give(lost)
    await until(lambda: said(pair.back) == min(before + lost, 41))
    await pair.mend()
    made.give(41)
    async with asyncio.timeout(SECONDS):
        assert await reading == ("".join(PIECES), finished())


async def test_a_request_that_was_lost_is_asked_again(pair: Pair, made: Made) -> None:
    made.give(41)
    pair.break_link()
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    await until(lambda: pair.there.lost)
    assert made.made == 0
    await pair.mend()
    async with asyncio.timeout(SECONDS):
        assert await reading == ("".join(PIECES), finished())


async def test_what_is_made_while_the_link_comes_back_is_not_told_twice(pair: Pair, made: Made) -> None:
    """The new connection carries later pieces before the question for the lost ones arrives."""
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    made.give(3)
    await until(lambda: said(pair.back) == 3)
    pair.break_link()
    made.give(3)
    await until(lambda: said(pair.back) == 6)
    pair.there.is_broken = pair.back.is_broken = False
    again = pair.requests.ask_again()
    made.give(3)
    await until(lambda: said(pair.back) == 9)
    for message in again:
        await pair.there.send(message)
    made.give(41)
    async with asyncio.timeout(SECONDS):
        assert await reading == ("".join(PIECES), finished())


async def test_a_link_that_breaks_again_and_again_loses_nothing(pair: Pair, made: Made) -> None:
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    for _ in range(13):
        made.give(2)
        await asyncio.sleep(0)
        pair.break_link()
        made.give(1)
        await asyncio.sleep(0.002)
        await pair.mend()
    made.give(41)
    async with asyncio.timeout(SECONDS):
        assert await reading == ("".join(PIECES), finished())


async def test_an_error_that_was_lost_is_told_again(pair: Pair, made: Made) -> None:
    made.error = EngineError("the engine is out of order")
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    made.give(40)
    await until(lambda: said(pair.back) == 40)
    pair.break_link()
    made.give(1)
    await until(lambda: len(pair.back.lost) == 1)
    await pair.mend()
    with pytest.raises(EngineError, match="out of order"):
        async with asyncio.timeout(SECONDS):
            await reading


async def test_a_cancellation_that_was_lost_is_said_again(pair: Pair, made: Made) -> None:
    events = pair.requests.generate(REQUEST)
    made.give(1)
    async with asyncio.timeout(SECONDS):
        await anext(events)
    pair.break_link()
    await events.aclose()
    assert isinstance(pair.there.lost[-1], RequestCancel)
    assert not made.was_closed
    await pair.mend()
    await until(lambda: made.was_closed)


async def test_a_peer_that_leaves_a_gap_without_a_reason_is_refused(pair: Pair, made: Made) -> None:
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    await until(lambda: pair.there.seen)
    opened = pair.there.seen[0]
    assert isinstance(opened, RequestOpen)
    pair.requests.take(RequestEvent(request=opened.request, offset=7, text="later"))
    with pytest.raises(ProtocolError, match="gap"):
        async with asyncio.timeout(SECONDS):
            await reading


async def test_a_new_process_of_the_asking_peer_gets_no_old_answer(pair: Pair, made: Made) -> None:
    reading = asyncio.create_task(read(pair.requests.generate(REQUEST)))
    made.give(1)
    await until(lambda: said(pair.back) == 1)
    pair.answers.forget()
    await until(lambda: made.was_closed)
    pair.requests.fail(PeerAway("the other peer's daemon started anew; ask again"))
    with pytest.raises(PeerAway):
        await reading
    other = RemoteRequests(pair.there)  # type: ignore[arg-type]
    pair.back.deliver = lambda message: _taken(other, message)
    made.give(41)
    async with asyncio.timeout(SECONDS):
        assert await read(other.generate(REQUEST)) == ("".join(PIECES), finished())


async def _taken(requests: RemoteRequests, message: Message) -> None:
    requests.take(message)


async def test_answers_that_are_over_are_not_kept_for_ever(pair: Pair, made: Made) -> None:
    for _ in range(30):
        made.give(41)
        async with asyncio.timeout(SECONDS):
            await read(pair.requests.generate(REQUEST))
    assert len(pair.answers._answers) <= 8
