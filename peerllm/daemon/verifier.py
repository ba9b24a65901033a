"""The verifying peer's work: blocks in, verdicts out. Nothing here trusts the drafting peer."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import structlog

from peerllm.daemon.boundary import Boundary
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.deadlines import StepDeadline
from peerllm.daemon.engine import Engine
from peerllm.decoding.verifying import Repeat, VerifyingSession
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerllmError, ProtocolError, WorkerDied, WorkerHung
from peerllm.protocol.fields import to_map
from peerllm.protocol.messages import (
    CandidateBlock,
    Message,
    PrefillChunk,
    PrefillTaken,
    Refusal,
    SessionClose,
    SessionOpen,
    SessionState,
    Verdict,
)
from peerllm.protocol.tensors import check_wire_bytes

log = structlog.get_logger(__name__)

_Job = Callable[[], Awaitable[None]]


class Verifier:
    """Judges blocks in the order in which they came. `take` never blocks for long: it queues, and waits only when more
    than MAX_UNPROCESSED_BYTES are queued, which holds the sender back over the link's own credits."""

    def __init__(self, engine: Engine, channel: MessageChannel, boundary: Boundary, *, max_sessions: int) -> None:
        self._engine = engine
        self._channel = channel
        self._boundary = boundary
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[int, VerifyingSession] = OrderedDict()
        self._jobs: asyncio.Queue[tuple[Message, int, _Job]] = asyncio.Queue()
        self._deaths: OrderedDict[int, int] = OrderedDict()
        """How often the worker died while it computed something of a session."""
        self._queued_bytes = 0
        self._blocks = StepDeadline()
        self._prefills = StepDeadline(limits.PREFILL_DEADLINE_SECONDS)
        self._room = asyncio.Event()
        self._room.set()

    async def take(self, message: Message) -> None:
        """Queues what a message asks for. Waits while too much is queued."""
        arrived = time.monotonic()
        if isinstance(message, SessionOpen):
            await self._queue(message, message.session, 0, lambda: self._open(message))
        elif isinstance(message, PrefillChunk):
            await self._queue(message, message.session, len(message.hidden), lambda: self._prefill(message))
        elif isinstance(message, CandidateBlock):
            await self._queue(message, message.session, len(message.hidden), lambda: self._judge(message, arrived))
        elif isinstance(message, SessionClose):
            await self._queue(message, message.session, 0, lambda: self._close(message.session))

    async def run(self) -> None:
        """Does what is queued; an error ends its session and nothing else. A worker that dies ends none: the session's
        rows are asked for once its successor has loaded."""
        while True:
            message, session, job = await self._jobs.get()
            try:
                try:
                    await self._engine.until_loaded()
                    await job()
                except (WorkerDied, WorkerHung):
                    if self._count_death(session) > limits.MAX_WORKER_DEATHS:
                        raise
                    await self._engine.until_loaded()
                    if isinstance(message, CandidateBlock):  # what else is lost, the block that follows finds out
                        await self._channel.send(SessionState(session=session, length=0))
            except PeerllmError as error:
                log.warning("session_refused", error=error.code, reason=error.message)
                self._sessions.pop(session, None)
                await self._channel.send(Refusal.of(error, session=session))

    def caches_lost(self) -> None:
        """The worker is a new one: what is asked of the old one's sessions is answered with what is lacking."""
        self._sessions.clear()

    def _count_death(self, session: int) -> int:
        self._deaths[session] = self._deaths.get(session, 0) + 1
        while len(self._deaths) > self._max_sessions:
            self._deaths.popitem(last=False)
        return self._deaths.get(session, 0)

    async def _queue(self, message: Message, session: int, size: int, job: _Job) -> None:
        size += limits.MESSAGE_OVERHEAD_BYTES
        while self._queued_bytes + size > limits.MAX_UNPROCESSED_BYTES:
            self._room.clear()
            await self._room.wait()
        self._queued_bytes += size

        async def sized_job() -> None:
            try:
                await job()
            finally:
                self._queued_bytes -= size
                self._room.set()

        self._jobs.put_nowait((message, session, sized_job))

    async def _open(self, message: SessionOpen) -> None:
        while len(self._sessions) >= self._max_sessions and message.session not in self._sessions:
            # The drafting peer forgot to close one, or died: the one unused for longest gives way.
            oldest, _ = self._sessions.popitem(last=False)
            await self._engine.call("close", session=oldest)
        await self._engine.call("open", session=message.session, sampling=to_map(message.sampling))
        self._sessions[message.session] = VerifyingSession(message.session, context=self._boundary.context)

    async def _prefill(self, message: PrefillChunk) -> None:
        session = self._sessions.get(message.session)
        if session is None or message.start > session.length:
            return  # rows before these were lost with a connection: the block that follows tells the sender
        session.check_prefill(message.start, message.rows)
        self._check_hidden(message.hidden, message.rows)
        began = time.monotonic()
        await self._engine.call(
            "prefill",
            message.hidden,
            deadline=self._prefills.seconds,
            session=message.session,
            start=message.start,
            rows=message.rows,
        )
        self._prefills.took(time.monotonic() - began)
        session.prefilled(message.start, message.rows)
        await self._channel.send(PrefillTaken(session=message.session, length=session.length))

    async def _judge(self, block: CandidateBlock, arrived: float) -> None:
        session = self._sessions.get(block.session)
        if session is None or block.start > session.length:
            length = 0 if session is None else session.length
            await self._channel.send(SessionState(session=block.session, length=length))
            return
        self._sessions.move_to_end(block.session)
        decision = session.take(block)
        if isinstance(decision, Repeat):
            await self._channel.send(decision.verdict)
            return
        self._check_hidden(block.hidden, len(block.candidates) + 1)
        began = time.monotonic()
        reply = await self._engine.call(
            "verify",
            block.hidden,
            deadline=self._blocks.seconds,
            session=block.session,
            start=block.start,
            candidates=list(block.candidates),
        )
        self._blocks.took(time.monotonic() - began)
        values = reply.values
        verdict = Verdict(
            session=block.session,
            round=block.round,
            accepted=values["accepted"],
            next_token=values["next_token"],
            layers_us=values["layers_us"],
            verdict_us=values["verdict_us"],
            total_us=int((time.monotonic() - arrived) * 1e6),
        )
        session.judged(block, verdict)
        await self._channel.send(verdict)

    async def _close(self, session: int) -> None:
        if self._sessions.pop(session, None) is not None:
            await self._engine.call("close", session=session)

    def _check_hidden(self, hidden: bytes, rows: int) -> None:
        boundary = self._boundary
        try:
            check_wire_bytes(hidden, boundary.codec, boundary.dtype, rows, boundary.width)
        except ProtocolError as error:
            raise ProtocolError(f"the drafting peer sent {error.message}") from None
