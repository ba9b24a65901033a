"""One epoch of a link: from an attempt in the room to an authenticated channel, and its life until it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from peerllm.link import frames
from peerllm.link.config import LinkConfig, LinkState, Urgency
from peerllm.link.frames import Frame, Kind
from peerllm.link.greeting import Greeting, encode_refusal, refusal
from peerllm.link.inbox import Inbox
from peerllm.link.liveness import TICK_SECONDS, Life, Liveness
from peerllm.link.outbox import Outbox
from peerllm.link.signaling import (
    VERSION,
    Attempt,
    BeginAgain,
    Candidate,
    Description,
    MoreCandidates,
    StaleEpoch,
    decode_body,
    encode_body,
)
from peerllm.link.transport import Transport
from peerllm.protocol import limits
from peerllm.protocol.errors import (
    LinkError,
    NoPath,
    PeerAway,
    PeerllmError,
    ProtocolError,
    VersionMismatch,
)

_RTT_GAIN = 1 / 8
"""RFC 6298's smoothing."""

log = structlog.get_logger(__name__)


class EpochStale(LinkError):
    """The controlled side has seen `epoch` or later."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the other peer has seen epoch {epoch}")
        self.epoch = epoch


class Connection:
    """
    Args:
        hello: this side's HELLO body, asked when the channel opens.
        on_phase: SIGNALING, ICE, HELLO as they begin.
        on_life: the liveness changed.
        on_message: `inbox.pop` has a message.
        on_room: credit came back.
        on_again: the controlled side asks for a new attempt.
        on_lost: the connection ended by itself; called at most once, never after `close`.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: LinkConfig,
        *,
        is_controlling: bool,
        hello: Callable[[], bytes],
        on_phase: Callable[[LinkState], None],
        on_life: Callable[[Connection, Life], None],
        on_message: Callable[[], None],
        on_room: Callable[[], None],
        on_again: Callable[[Connection], None],
        on_lost: Callable[[Connection, PeerllmError], None],
    ) -> None:
        self.epoch = attempt.epoch
        self.outbox = Outbox(self.epoch)
        self.inbox = Inbox()
        self.rtt_ms: float | None = None
        self.life = Life.WELL
        self._attempt = attempt
        self._config = config
        self._is_controlling = is_controlling
        self._hello = hello
        self._on_phase = on_phase
        self._on_life = on_life
        self._on_message = on_message
        self._on_room = on_room
        self._on_again = on_again
        self._on_lost = on_lost
        self._greeting_made: Greeting | None = None
        self._remote: Description | None = None
        self._is_up = False
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._liveness = Liveness(time.monotonic())
        self._ticker: asyncio.TimerHandle | None = None
        self._found: asyncio.Queue[Candidate] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport = Transport(
            config,
            is_controlling=is_controlling,
            on_candidate=self._found.put_nowait,
            on_message=self._guarded_frame,
            on_writable=self.pump,
            on_closed=lambda: self._fail(LinkError("the connection to the other peer was closed")),
        )

    # --- Making it ----------------------------------------------------------------------------------------------------

    async def establish(self) -> None:
        """Until both sides have proved themselves, and, on the controlled side, until the other took this connection.

        Raises:
            PeerAway, NoPath, LinkError, ProtocolError, VersionMismatch: it is of no use; `close` it.
        """
        remote = await self._phase(
            LinkState.SIGNALING,
            limits.SIGNALING_SECONDS,
            self._exchange_descriptions(),
            lambda: PeerAway("The other peer does not answer through the signaling server."),
        )
        sending = self._spawn(self._send_candidates())
        self._spawn(self._listen())
        await self._phase(
            LinkState.ICE,
            limits.ICE_SECONDS,
            self._transport.connect(remote),
            lambda: NoPath(self._transport.why_no_path()),
        )
        self._transport.stop_gathering()
        await self._phase(
            LinkState.HELLO,
            limits.HELLO_SECONDS,
            self._greet(),
            lambda: LinkError("The other peer did not say HELLO in time."),
        )
        sending.cancel()

    async def _phase(
        self, state: LinkState, seconds: float, work: Coroutine[Any, Any, Any], on_timeout: Callable[[], PeerllmError]
    ) -> Any:
        self._on_phase(state)
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise on_timeout() from None

    async def _exchange_descriptions(self) -> Description:
        mine = await self._transport.open_sockets()
        await self._attempt.send(encode_body(mine))
        self._transport.start_gathering()
        early: list[Candidate] = []
        while True:
            body = decode_body(await self._attempt.receive())
            if isinstance(body, StaleEpoch):
                raise EpochStale(body.epoch)
            if isinstance(body, MoreCandidates):
                early += body.candidates[: limits.MAX_REMOTE_CANDIDATES]
            if isinstance(body, Description):
                if body.oldest > VERSION or body.newest < VERSION:
                    raise VersionMismatch(
                        f"the other peer speaks versions {body.oldest} to {body.newest} of the link, "
                        f"this one {VERSION}: the older of the two has to be updated"
                    )
                self._remote = body
                await self._transport.add_candidates(tuple(early))
                return body

    async def _send_candidates(self) -> None:
        while True:
            found = [await self._found.get()]
            while not self._found.empty():
                found.append(self._found.get_nowait())
            await self._attempt.send(encode_body(MoreCandidates(candidates=tuple(found))))

    async def _listen(self) -> None:
        """What comes through the room after the description, for as long as the connection lives."""
        while True:
            body = decode_body(await self._attempt.receive())
            if isinstance(body, MoreCandidates) and not self._is_up:
                await self._transport.add_candidates(body.candidates)
            elif isinstance(body, BeginAgain) and self._is_up:
                self._on_again(self)

    async def ask_again(self) -> None:
        """Asks the controlling side for a new attempt. Raises PeerAway or RoomError when the room is not reached."""
        await self._attempt.send(encode_body(BeginAgain()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # What was exchanged so far may still do.
            log.info("link.room_lost", epoch=self.epoch, error=repr(task.exception()))

    # --- HELLO --------------------------------------------------------------------------------------------------------

    def _greeting(self) -> Greeting:
        """Made when it is first needed: the other's HELLO may come before this side has sent its own."""
        if self._greeting_made is None:
            if self._remote is None:
                raise ProtocolError("HELLO before the description")
            self._greeting_made = Greeting(
                is_controlling=self._is_controlling,
                epoch=self.epoch,
                key=self._attempt.session_key,
                fingerprints=(self._transport.fingerprint, self._remote.fingerprint),
                body=self._hello(),
            )
        return self._greeting_made

    async def _greet(self) -> None:
        self._transport.send(self._greeting().first())
        await self._greeted

    def _greeting_frame(self, frame: Frame) -> None:
        greeting = self._greeting()
        answer = greeting.take(frame)
        if answer is not None:
            self._transport.send(answer)
        if greeting.is_done and not self._greeted.done():
            self._greeted.set_result(None)

    @property
    def remote_hello(self) -> bytes:
        """The other side's body; empty before it has come."""
        return (self._greeting_made.remote_body if self._greeting_made is not None else None) or b""

    def begin(self) -> None:
        """This connection is the link's now. On the controlling side the other is told so."""
        if self._is_controlling:
            self._transport.send(frames.encode_control(Kind.START, self.epoch))
        self._is_up = True
        self._liveness = Liveness(time.monotonic())
        self._tick()
        for frame in self._greeting().take_early():
            self._frame(frame)

    def refuse(self, error: PeerllmError) -> None:
        """Tells the other side why this one does not go on."""
        with contextlib.suppress(LinkError):
            self._transport.send(encode_refusal(self.epoch, error))

    # --- Living -------------------------------------------------------------------------------------------------------

    def _guarded_frame(self, data: bytes) -> None:
        """No exception leaves a handler: aiortc would end the connection without a word, or swallow it."""
        try:
            frame = frames.decode(data)
            if frame is None or self._is_closed:
                return
            if frame.epoch != self.epoch:
                log.debug("link.old_epoch_dropped", epoch=self.epoch, frame_epoch=frame.epoch)
            elif self._is_up:
                self._frame(frame)
            else:
                self._greeting_frame(frame)
        except PeerllmError as error:
            self._fail(error)
        except Exception as error:
            log.exception("link.handler_failed", epoch=self.epoch)
            self._fail(LinkError(f"an internal error ended the connection: {error!r}"))

    def _frame(self, frame: Frame) -> None:
        self._liveness.heard(time.monotonic())
        self._set_life(Life.WELL)
        if frame.kind is Kind.DATA:
            if self.inbox.feed(frame):
                self._on_message()
        elif frame.kind is Kind.CREDIT:
            self.outbox.take_credit(frames.decode_number(frame.body))
            self._on_room()
        elif frame.kind is Kind.PING:
            self._send_control(Kind.PONG, frame.body[:8])
        elif frame.kind is Kind.PONG:
            self._measure(frame.body)
        elif frame.kind is Kind.REFUSE:
            self._fail(refusal(frame.body))

    def _measure(self, body: bytes) -> None:
        sample = (time.monotonic_ns() - frames.decode_number(body)) / 1e6
        if not 0 <= sample < limits.DOWN_SECONDS * 1000:
            return
        self.rtt_ms = sample if self.rtt_ms is None else self.rtt_ms + _RTT_GAIN * (sample - self.rtt_ms)

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        now = time.monotonic()
        self._set_life(self._liveness.judge(now))
        if not self._is_closed and self._liveness.is_ping_due(now):
            self._send_control(Kind.PING, frames.encode_number(time.monotonic_ns()))

    def suspect(self) -> None:
        """Something outside says that the path may be gone. A ping asks."""
        self._liveness.suspect()
        self._set_life(Life.SUSPECT)
        self._send_control(Kind.PING, frames.encode_number(time.monotonic_ns()))

    def _set_life(self, life: Life) -> None:
        if life is self.life:
            return
        self.life = life
        if life is Life.DOWN:
            self._fail(PeerAway("nothing was heard from the other peer for too long"))
        else:
            self._on_life(self, life)

    def put(self, message: bytes, urgency: Urgency) -> None:
        """The caller has asked `outbox.has_room`."""
        self.outbox.put(message, urgency)
        self.pump()

    def pump(self) -> None:
        """Hands slices down for as long as they would leave soon, and decides as late as possible which."""
        try:
            while not self._is_closed and self._transport.is_writable:
                piece = self.outbox.next_slice(self._transport.slice_bytes)
                if piece is None:
                    return
                self._transport.send(piece)
        except LinkError as error:
            self._fail(error)

    def pop(self) -> bytes | None:
        message = self.inbox.pop()
        if message is not None:
            processed = self.inbox.credit_due()
            if processed is not None:
                self._send_control(Kind.CREDIT, frames.encode_number(processed))
        return message

    def _send_control(self, kind: Kind, body: bytes) -> None:
        try:
            self._transport.send(frames.encode_control(kind, self.epoch, body))
        except LinkError as error:
            self._fail(error)

    @property
    def transport(self) -> Transport:
        return self._transport

    # --- Ending -------------------------------------------------------------------------------------------------------

    def _fail(self, error: PeerllmError) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()  # seen: nobody may be waiting for it
        self._on_lost(self, error)

    async def close(self) -> None:
        """At most LINK_CLOSE_SECONDS. May be called again."""
        self._is_closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._transport.close()
