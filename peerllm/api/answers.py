"""Answers under way: one task each, which owns the backend's generator from its first step to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from peerllm.protocol.errors import PeerllmError
from peerllm.protocol.requests import Event, Finished

log = structlog.get_logger()


class Answer:
    """The events of one answer, read by a request's handler.

    A task of its own runs the generator, so that waiting with a timeout never cancels the generator, and its
    `async with` blocks begin and end in the same task. Nothing is read ahead but one event: a slow client slows the
    generator down.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._taken: asyncio.Queue[Event | PeerllmError] = asyncio.Queue(maxsize=1)
        self._stop_reason: PeerllmError | None = None
        self._is_finished = False
        self.task = asyncio.create_task(self._run(), name="peerllm api answer")

    async def next(self, within: float | None = None) -> Event | None:
        """The next event, or None when there is none within so many seconds.

        Raises:
            PeerllmError: the answer ended so.
        """
        try:
            async with asyncio.timeout(within):
                event = await self._taken.get()
        except TimeoutError:
            return None
        if isinstance(event, PeerllmError):
            raise event
        self._is_finished = isinstance(event, Finished)
        return event

    def stop(self, reason: PeerllmError) -> None:
        """Ends the generator; the handler gets `reason` instead of the next event."""
        if not self._is_finished:
            self._stop_reason = reason
            self.task.cancel()

    async def close(self) -> None:
        """Ends the generator unless it has finished, and waits until it is gone. If this is cancelled, the generator
        still comes to its end."""
        if not self._is_finished:
            self._stop_reason = None
            self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        try:
            end: PeerllmError | None = await self._copy()
        except PeerllmError as error:
            end = error
        except asyncio.CancelledError:
            if self._stop_reason is None:
                raise
            end = self._stop_reason
        except Exception:
            log.exception("api_answer_failed")
            end = PeerllmError("The daemon met an internal error; its log has the details.")
        if end is not None:
            await self._taken.put(end)

    async def _copy(self) -> PeerllmError | None:
        is_complete = False
        async with aclosing(self._events) as events:
            async for event in events:
                if is_complete:
                    continue  # nobody reads after Finished: the generator only runs to its end
                await self._taken.put(event)
                is_complete = isinstance(event, Finished)
        return None if is_complete else PeerllmError("The answer ended before it was finished.")


class Answers:
    """All answers of one server, so that none outlives it."""

    def __init__(self) -> None:
        self._open: set[Answer] = set()

    def start(self, events: AsyncGenerator[Event, None]) -> Answer:
        answer = Answer(events)
        self._open.add(answer)
        answer.task.add_done_callback(lambda _: self._open.discard(answer))
        return answer

    def stop_all(self, reason: PeerllmError) -> None:
        for answer in list(self._open):
            answer.stop(reason)

    async def wait_closed(self, within: float) -> None:
        """Waits for all to end. Those that still tidy up after so many seconds are cancelled in it."""
        tasks = {answer.task for answer in self._open}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=within)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
