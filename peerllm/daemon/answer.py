"""One answer in the making, at the drafting peer: prefill, rounds, text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from peerllm.daemon.boundary import Boundary
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.deadlines import StepDeadline
from peerllm.daemon.engine import Engine
from peerllm.daemon.worker_process import Reply
from peerllm.decoding.drafting import BlockOrder, DraftingSession
from peerllm.decoding.replay import ReplayLog
from peerllm.decoding.stops import StopScanner
from peerllm.link import LinkState, Urgency
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, PeerllmError, ProtocolError, WorkerDied, WorkerHung
from peerllm.protocol.fields import to_map
from peerllm.protocol.messages import CandidateBlock, PrefillChunk, SessionClose, SessionOpen, SessionState, Verdict
from peerllm.protocol.requests import FinishReason, GenerateRequest, Usage
from peerllm.telemetry.ledger import RoundLedger

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

RESYNC = "resync"
"""In an inbox: the link is up anew, and what was on its way may be lost."""
Item = Verdict | SessionState | PeerllmError | str
_CLOSE_SECONDS = 2.0
_MAX_REPLAYS = 8
"""Within one round: a link that drops more often than this carries nothing anyway."""
_MAX_WAITING = 64


@dataclass(slots=True)
class Workplace:
    """What all answers of a drafting peer share."""

    engine: Engine
    channel: MessageChannel
    boundary: Boundary
    is_peer_ready: Callable[[], bool] = lambda: True
    """False while the other side loads its layers: that stops the clock."""
    rounds: StepDeadline = field(default_factory=StepDeadline)
    prefills: StepDeadline = field(default_factory=lambda: StepDeadline(limits.PREFILL_DEADLINE_SECONDS))


class Inbox:
    """What the other peer says of one session while an answer is made."""

    def __init__(self) -> None:
        self.rows_sent = 0
        """Of the prompt, or of a replay."""
        self.rows_taken = 0
        self._has_progressed = False
        self._arrived = asyncio.Event()
        self._messages: deque[Item] = deque()

    def put(self, item: Item) -> None:
        if len(self._messages) >= _MAX_WAITING:
            return  # no honest peer says so much of one round; the round's deadline judges it
        self._messages.append(item)
        self._arrived.set()

    def took(self, length: int) -> None:
        """The other peer has computed rows up to `length`."""
        self.rows_taken = length
        self._has_progressed = True

    @property
    def is_behind(self) -> bool:
        """The other peer still computes rows that come before the block."""
        return self.rows_taken < self.rows_sent

    def has_progressed(self) -> bool:
        """Since it was asked last."""
        before, self._has_progressed = self._has_progressed, False
        return before

    async def get(self) -> Item:
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()


class Answer:
    """One answer in the making. It outlives connections, the other side's process, and this side's worker: the caches
    of a new worker are filled again from the committed tokens."""

    def __init__(
        self, work: Workplace, request: GenerateRequest, drafting: DraftingSession, *, vocabulary: int, began: float
    ) -> None:
        self._work = work
        self._engine = work.engine
        self._channel = work.channel
        self._drafting = drafting
        self._policy = drafting.policy
        self._scanner = StopScanner(request.stop)
        boundary = work.boundary
        self._prefill_rows = boundary.prefill_rows
        self._replay = ReplayLog(boundary.codec, boundary.dtype, boundary.width)
        self._vocabulary = vocabulary
        self._texted: list[int] = []
        """Tokens that the worker has turned into text: its successor needs them for the characters they share."""
        self._text_tokens = 0
        self._worker_life = work.engine.restarts
        self._worker_deaths = 0
        self.session = secrets.randbits(63)
        self.ledger = RoundLedger(started=began)
        self._open_message = SessionOpen(session=self.session, sampling=request.sampling)
        self._sampling = to_map(request.sampling)

    @property
    def is_stopped(self) -> bool:
        return self._scanner.is_stopped

    @property
    def finish_reason(self) -> FinishReason:
        return "stop" if self.is_stopped else self._drafting.finish or "stop"

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self._drafting.prompt_length, completion_tokens=self._text_tokens)

    async def open(self) -> None:
        """Both caches take in the prompt but its last token. A chunk is on the wire while the next is computed."""
        await self._channel.send(self._open_message)
        await self._outlive(self._fill_caches)

    async def _fill_caches(self) -> None:
        """This side's caches, with all that is committed but the last token. Rows that were not sent yet are."""
        await self._engine.call("open", session=self.session, sampling=self._sampling)
        for start, tokens in self._drafting.prefill_chunks(self._prefill_rows):
            began = time.monotonic()
            reply = await self._engine.call(
                "prefill",
                deadline=self._work.prefills.seconds,
                session=self.session,
                start=start,
                tokens=list(tokens),
            )
            self._work.prefills.took(time.monotonic() - began)
            if start < self._replay.length:
                continue
            self._replay.add(start, len(tokens), reply.payload)
            await self._channel.send(
                PrefillChunk(session=self.session, start=start, rows=len(tokens), hidden=reply.payload)
            )

    async def _outlive(self, step: Callable[[], Awaitable[_T]]) -> _T:
        """`step`, which asks the worker: again, with filled caches, whenever the worker was replaced meanwhile.

        Raises:
            WorkerDied, WorkerHung: it died too often, or its successors do not come up.
        """
        while True:
            try:
                if self._worker_life != self._engine.restarts:
                    await self._engine.until_loaded()
                    self._worker_life = self._engine.restarts
                    await self._restore()
                return await step()
            except (WorkerDied, WorkerHung) as error:
                self._worker_deaths += 1
                if self._worker_deaths > limits.MAX_WORKER_DEATHS:
                    raise
                log.warning("answer_outlives_worker", reason=error.message, deaths=self._worker_deaths)
                await self._engine.until_loaded()

    async def _restore(self) -> None:
        self._drafting.drafter_lost()
        await self._fill_caches()
        if self._texted:
            await self._engine.call("text", session=self.session, tokens=self._texted, final=False)

    async def play_round(self, inbox: Inbox) -> str:
        """One block and its verdict; the text that may be shown."""
        began = time.monotonic()
        order, reply = await self._outlive(self._draft)
        if order.round == 0:
            inbox.rows_sent = self._replay.length
        candidates = tuple(reply.values["candidates"])
        block = CandidateBlock(
            session=self.session, round=order.round, start=order.start, candidates=candidates, hidden=reply.payload
        )
        sent = time.monotonic()
        # The first block must not overtake the prefill that it follows.
        await self._channel.send(block, Urgency.BULK if order.round == 0 else None)
        verdict = await self._verdict(block, inbox)
        now = time.monotonic()
        if verdict.next_token >= self._vocabulary:
            raise ProtocolError(f"the other peer's verdict names token {verdict.next_token}, which the model lacks")
        committed = self._drafting.judge(order.round, candidates, verdict.accepted, verdict.next_token)
        if committed is None:
            raise RuntimeError("a verdict was taken twice")
        self._replay.add(order.start, len(candidates) + 1, reply.payload, keep=verdict.accepted + 1)
        probabilities = reply.values["probabilities"]
        self._policy.observe(probabilities, verdict.accepted, now - began if order.round > 0 else None)
        self._work.rounds.took(now - began)
        self.ledger.add_round(
            drafted=len(candidates),
            accepted=verdict.accepted,
            tokens=len(committed.tokens),
            draft=reply.values["draft_us"] / 1e6,
            own_layers=reply.values["layers_us"] / 1e6,
            encode=reply.values["encode_us"] / 1e6,
            network=max(0.0, now - sent - verdict.total_us / 1e6),
            their_layers=verdict.layers_us / 1e6,
            verdict=verdict.verdict_us / 1e6,
            total=now - began,
        )
        return await self._show(committed.tokens[: -1 if committed.has_eos else None], committed.has_eos)

    async def _draft(self) -> tuple[BlockOrder, Reply]:
        order = self._drafting.next_block()
        first: dict[str, Any] = {"from": order.first}  # a keyword of Python's
        reply = await self._engine.call(
            "draft_block",
            deadline=self._work.rounds.seconds,
            session=self.session,
            tokens=list(order.tokens),
            draft_length=order.draft_length,
            min_probability=order.min_probability,
            **first,
        )
        self._drafting.block_drafted()
        return order, reply

    async def _verdict(self, block: CandidateBlock, inbox: Inbox) -> Verdict:
        """The verdict on this block. After a reconnect the block goes out again; rows that the other side lacks are
        replayed first.

        Raises:
            PeerAway: it does not answer in time, or loads for ever.
            ProtocolError: the other side asks for rows again and again.
        """
        replays = 0
        until = time.monotonic() + limits.PEER_LOADING_SECONDS
        while True:
            patience = self._work.prefills if inbox.is_behind else self._work.rounds
            try:
                async with asyncio.timeout(patience.seconds):
                    item = await inbox.get()
            except TimeoutError:
                if inbox.has_progressed():
                    continue  # a long prompt, and a slow machine
                if self._channel.link.state is not LinkState.UP:
                    continue  # the link's own deadline ends this
                if not self._work.is_peer_ready() and time.monotonic() < until:
                    continue
                raise PeerAway("the other peer did not answer in time; its daemon may be overloaded") from None
            if isinstance(item, Verdict):
                if item.round == block.round:
                    inbox.rows_taken = inbox.rows_sent
                    return item
            elif isinstance(item, SessionState):
                replays += 1
                if replays > _MAX_REPLAYS:
                    raise ProtocolError(f"the other peer asked for the same rows {replays} times")
                inbox.rows_taken, inbox.rows_sent = item.length, self._replay.length
                await self._replay_from(item.length)
                await self._channel.send(block, Urgency.BULK)
            elif isinstance(item, PeerllmError):
                raise item
            else:
                await self._channel.send(block, Urgency.BULK)

    async def _replay_from(self, length: int) -> None:
        if length == 0:
            await self._channel.send(self._open_message)
        for piece in self._replay.since(length):
            await self._channel.send(
                PrefillChunk(session=self.session, start=piece.start, rows=piece.rows, hidden=piece.hidden)
            )

    async def _show(self, tokens: tuple[int, ...], is_last: bool) -> str:
        """The text of final tokens, one by one, so that a stop string ends the count where it ends the text."""
        shown = ""
        if tokens:
            reply = await self._outlive(
                lambda: self._engine.call("text", session=self.session, tokens=list(tokens), final=False)
            )
            self._texted += tokens
            for piece in reply.values["pieces"]:
                self._text_tokens += 1
                shown += self._scanner.push(piece)
                if self._scanner.is_stopped:
                    return shown
        self._text_tokens += is_last  # the EOS token was made too
        return shown

    async def finish_text(self) -> str:
        if self._scanner.is_stopped:
            return ""
        reply = await self._outlive(lambda: self._engine.call("text", session=self.session, tokens=[], final=True))
        return self._scanner.push(reply.values["text"]) + self._scanner.finish()

    async def close(self) -> None:
        """Both sides forget the session. Never raises for a peer or a worker that is gone: it forgot already."""
        await self._tell(lambda: self._engine.call("close", session=self.session))
        await self._tell(lambda: self._channel.send(SessionClose(session=self.session)))

    async def _tell(self, step: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await step()
        except (PeerllmError, TimeoutError) as error:
            log.info("session_close_skipped", reason=str(error))
