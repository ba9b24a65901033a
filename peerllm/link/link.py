"""The link that the daemon holds: one peer, over however many connections its life takes.

The controlling side, whose id is smaller, begins attempts and takes the first that is confirmed; the other side accepts
them and follows the START frame. So both always agree which connection is the link, without a vote. At SUSPECT attempts
begin beside the old connection, one a second; whichever lives first wins, and the old one winning is a win too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable

import structlog

from peerllm.link.aioice_private import local_addresses
from peerllm.link.changes import Changes
from peerllm.link.config import LinkConfig, LinkState, LinkStats, Urgency
from peerllm.link.connection import Connection, EpochStale
from peerllm.link.greeting import PeerRefused
from peerllm.link.liveness import Life
from peerllm.link.signaling import Attempt, SeatedPeer, StaleEpoch, encode_body
from peerllm.link.watch import Watch
from peerllm.protocol import limits
from peerllm.protocol.errors import LinkError, PeerAway, PeerllmError, ProtocolError, RoomClosed, VersionMismatch

log = structlog.get_logger(__name__)


class Link:
    """
    Args:
        peer: the authenticated peer, from `rooms`.
        config: or what gives it for each attempt: signaling offers other relays as time goes by.
        hello: this side's HELLO body for each new connection, at most MAX_HELLO_BYTES.
        on_hello: called with the peer's body before each new epoch is UP. A PeerllmError that it raises refuses the
            peer: both sides' `start` raise it, and both links are DOWN.

    `on_state`, when set, is called with each new LinkState. All methods belong to one event loop.
    """

    def __init__(
        self,
        peer: SeatedPeer,
        config: LinkConfig | Callable[[], LinkConfig],
        hello: Callable[[], bytes],
        on_hello: Callable[[bytes], None],
    ) -> None:
        self._peer = peer
        self._make_config = config if callable(config) else lambda: config
        self._config = self._make_config()
        self._hello = hello
        self._on_hello = on_hello
        self.on_state: Callable[[LinkState], None] | None = None
        self.is_controlling = peer.local_id < peer.remote_id
        self._state = LinkState.SIGNALING
        self._epoch = 0
        self._current: Connection | None = None
        self._attempts: dict[Connection, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._seeker: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._asking: asyncio.Task[None] | None = None
        self._begun_epoch = 0
        self._direct_timer: asyncio.TimerHandle | None = None
        self._direct_pause = self._config.direct_retry_seconds
        self._wanted = asyncio.Event()
        self._failure: PeerllmError | None = None
        self._last_error: PeerllmError | None = None
        self._place_gone: RoomClosed | None = None
        """Why no attempt can begin any more: a connection that is lost now is not replaced."""
        self._changes = Changes()
        self._send_locks = {urgency: asyncio.Lock() for urgency in Urgency}
        self._was_up = False

    # --- What the daemon calls ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until UP. Safe to cancel; then `close` it.

        Raises:
            NoPath, PeerAway, LinkError, RoomClosed, VersionMismatch: why there is no link; nothing goes on in the
                background.
        """
        self._wanted.set()
        self._arm_deadline(limits.LINK_START_SECONDS)
        self._seeker = asyncio.create_task(self._seek() if self.is_controlling else self._accept())
        self._watch = Watch((lambda: ()) if self._config.loopback else local_addresses, self._sign_seen)
        while self._state is not LinkState.UP:
            if self._failure is not None:
                await self._stop()
                raise self._failure
            await self._changes.next()

    async def send(self, message: bytes, urgency: Urgency = Urgency.ROUND) -> None:
        """Returns when the link has taken the message. Waits while too much is unprocessed or the link is not UP.

        Order holds within an urgency. Safe to cancel: the message is taken whole or not at all.

        Raises:
            PeerAway: the link is DOWN for good.
            ProtocolError: the message is longer than MAX_MESSAGE_BYTES.
        """
        if len(message) > limits.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(message)} bytes; at most {limits.MAX_MESSAGE_BYTES} are allowed")
        async with self._send_locks[urgency]:
            while True:
                self._check()
                connection = self._current
                if (
                    connection is not None
                    and self._state is LinkState.UP
                    and connection.outbox.has_room(len(message), urgency)
                ):
                    connection.put(message, urgency)
                    return
                await self._changes.next()

    async def receive(self) -> bytes:
        """The next whole message, the most urgent first. Safe to cancel; for one caller at a time.

        Raises:
            PeerAway: the link is DOWN for good.
        """
        while True:
            message = self._current.pop() if self._current is not None else None
            if message is not None:
                return message
            self._check()
            await self._changes.next()

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def epoch(self) -> int:
        """Of the present connection; 0 before the first. Frames of older epochs are dropped."""
        return self._epoch

    def stats(self) -> LinkStats:
        current = self._current
        if current is None:
            return LinkStats(state=self._state, epoch=self._epoch)
        counters = current.transport.counters()
        return LinkStats(
            state=self._state,
            epoch=self._epoch,
            path=current.transport.path,
            rtt_ms=current.rtt_ms,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            packets_sent=counters.packets_sent,
            packets_received=counters.packets_received,
            retransmitted=current.transport.retransmitted,
        )

    async def close(self) -> None:
        """Ends the link; at most LINK_CLOSE_SECONDS. May be called again."""
        self._fail(PeerAway("the link was closed"))
        await self._stop()

    # --- Seeking connections ------------------------------------------------------------------------------------------

    async def _seek(self) -> None:
        """The controlling side: an attempt now and then, for as long as one is wanted."""
        while self._place_gone is None:
            await self._wanted.wait()
            begun = time.monotonic()
            await self._begin()
            await self._pause_since(begun)

    async def _begin(self, *, direct_only: bool = False) -> None:
        """The controlling side alone counts epochs, and never uses one twice."""
        self._begun_epoch = max(self._begun_epoch, self._epoch) + 1
        try:
            async with asyncio.timeout(limits.SIGNALING_SECONDS):
                attempt = await self._peer.begin(self._begun_epoch)
        except TimeoutError:
            self._last_error = PeerAway("The signaling server does not answer.")
        except RoomClosed as error:
            self._lose_place(error)
        except PeerllmError as error:
            self._last_error = error
            log.info("link.cannot_begin", error=error.code)
        else:
            self._try(attempt, direct_only=direct_only)

    async def _pause_since(self, begun: float) -> None:
        """Until the next attempt may begin: on a first start as soon as no other runs, later once a second."""
        while True:
            if not self._was_up and not self._attempts:
                await asyncio.sleep(limits.RETRY_SECONDS)
                return
            pause = limits.REPLACEMENT_SECONDS if self._was_up else limits.FIRST_ATTEMPT_SECONDS
            left = begun + pause - time.monotonic()
            if left <= 0:
                await asyncio.sleep(0)  # whatever the time says, others run between two attempts
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changes.next()

    async def _accept(self) -> None:
        """The other side: takes what is begun, at any time; the peer may have been started anew."""
        while self._place_gone is None:
            try:
                attempt = await self._peer.accept()
                if attempt.epoch <= self._epoch:
                    await attempt.send(encode_body(StaleEpoch(epoch=self._epoch)))
                    continue
            except RoomClosed as error:
                self._lose_place(error)
            except PeerllmError as error:
                self._last_error = error
                log.info("link.cannot_accept", error=error.code)
                await asyncio.sleep(limits.RETRY_SECONDS)
            else:
                self._try(attempt)

    def _lose_place(self, error: RoomClosed) -> None:
        """The room ended for this peer. A connection that is there lives on by itself."""
        self._last_error = self._place_gone = error
        log.info("link.place_gone", error=error.code)
        if self._current is None:
            self._fail(error)

    def _try(self, attempt: Attempt, *, direct_only: bool = False) -> None:
        config = self._make_config()
        if direct_only:
            config = dataclasses.replace(config, direct_only=True)
        while len(self._attempts) >= limits.MAX_ATTEMPTS:
            oldest = next(iter(self._attempts))
            self._attempts.pop(oldest).cancel()
        connection = Connection(
            attempt,
            config,
            is_controlling=self.is_controlling,
            hello=self._hello,
            on_phase=self._phase,
            on_life=self._life,
            on_message=self._changes.happened,
            on_room=self._changes.happened,
            on_again=self._asked_again,
            on_lost=self._lost,
        )
        task = asyncio.create_task(self._establish(connection))
        self._attempts[connection] = task
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _establish(self, connection: Connection) -> None:
        try:
            await connection.establish()
            self._attempts.pop(connection, None)
            self._adopt(connection)
        except PeerRefused as error:
            self._fail(error.cause)
        except VersionMismatch as error:
            self._fail(error)  # it will not speak another one in a moment
        except EpochStale as error:
            self._epoch = max(self._epoch, error.epoch)
        except PeerllmError as error:
            self._last_error = error
            log.info("link.attempt_failed", epoch=connection.epoch, error=error.code, reason=error.message)
        except Exception as error:
            self._last_error = LinkError(f"an internal error ended the attempt: {error!r}")
            log.exception("link.attempt_broke", epoch=connection.epoch)
        finally:
            self._attempts.pop(connection, None)
            if connection is not self._current:
                await connection.close()
            self._changes.happened()

    def _adopt(self, connection: Connection) -> None:
        """This connection is the link now, unless a newer one is."""
        if self._failure is not None or connection.epoch <= self._epoch:
            return
        try:
            self._on_hello(connection.remote_hello)
        except PeerllmError as error:
            connection.refuse(error)
            self._fail(error)
            return
        if self._state is LinkState.UP:
            # The controlling side moved before this one noticed anything: what was under way is gone all the same.
            self._set_state(LinkState.SUSPECT)
        old, self._current = self._current, connection
        self._epoch = connection.epoch
        connection.begin()
        self._wanted.clear()
        self._was_up = True
        self._arm_deadline(None)
        self._cancel_attempts()
        if old is not None:
            self._discard(old)
        self._plan_direct(connection.transport.path == "relayed")
        self._set_state(LinkState.UP)

    def _plan_direct(self, is_relayed: bool) -> None:
        """A relay costs money and a detour: now and then the controlling side looks for a way without."""
        if self._direct_timer is not None:
            self._direct_timer.cancel()
            self._direct_timer = None
        if not is_relayed:
            self._direct_pause = self._config.direct_retry_seconds
        elif self.is_controlling and not self._config.relay_only:
            self._direct_timer = asyncio.get_running_loop().call_later(self._direct_pause, self._look_for_direct)

    def _look_for_direct(self) -> None:
        self._direct_pause = min(2 * self._direct_pause, limits.MAX_DIRECT_RETRY_SECONDS)
        self._plan_direct(is_relayed=True)
        if self._state is LinkState.UP and not self._attempts:
            task = asyncio.create_task(self._begin(direct_only=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _cancel_attempts(self) -> None:
        for task in self._attempts.values():
            task.cancel()
        self._attempts.clear()

    def _discard(self, connection: Connection) -> None:
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- What connections tell ----------------------------------------------------------------------------------------

    def _phase(self, state: LinkState) -> None:
        # After the first UP the phases of replacements are nobody's business: the link is SUSPECT.
        if not self._was_up and self._failure is None:
            self._set_state(state)

    def _life(self, connection: Connection, life: Life) -> None:
        if connection is not self._current or self._failure is not None:
            return
        if life is Life.SUSPECT:
            self._seek_replacement()
        else:
            self._wanted.clear()
            self._arm_deadline(None)
            if self.is_controlling:
                self._cancel_attempts()
            self._set_state(LinkState.UP)

    def _lost(self, connection: Connection, error: PeerllmError) -> None:
        self._last_error = error
        if connection is not self._current or self._failure is not None:
            return
        if isinstance(error, PeerRefused):
            self._fail(error.cause)
            return
        log.info("link.lost", epoch=connection.epoch, error=error.code)
        self._current = None
        self._discard(connection)
        if self._place_gone is not None:
            self._fail(self._place_gone)
        else:
            self._seek_replacement()

    def _sign_seen(self, reason: str) -> None:
        """An address changed, or the machine slept: the path is suspect before any silence shows it."""
        if self._current is not None and self._failure is None:
            self._current.suspect()
        if not self.is_controlling and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        """The controlled side cannot begin an attempt; it asks through the room, which may itself be coming back."""
        epoch = self._epoch
        while self._state is LinkState.SUSPECT and self._epoch == epoch and self._current is not None:
            try:
                await self._current.ask_again()
            except PeerllmError as error:
                log.debug("link.cannot_ask", error=error.code)
            await asyncio.sleep(limits.RETRY_SECONDS)

    def _asked_again(self, connection: Connection) -> None:
        if connection is self._current and self._failure is None:
            connection.suspect()

    def _seek_replacement(self) -> None:
        if self._deadline is None:
            self._arm_deadline(self._config.kept_seconds)
        self._wanted.set()
        if self._state is not LinkState.SUSPECT:
            self._peer.suspect()
        self._set_state(LinkState.SUSPECT)

    # --- States and ends ----------------------------------------------------------------------------------------------

    def _arm_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._deadline = None
        if self._was_up:
            self._fail(self._place_gone or PeerAway("the other peer did not come back in time"))
        else:
            self._fail(self._last_error or PeerAway("the other peer did not begin to connect"))

    def _fail(self, error: PeerllmError) -> None:
        if self._failure is None:
            self._failure = error
            self._set_state(LinkState.DOWN)

    def _set_state(self, state: LinkState) -> None:
        if state is not self._state:
            self._state = state
            log.info("link.state", state=state.value, epoch=self._epoch)
            if self.on_state is not None:
                try:
                    self.on_state(state)
                except Exception:
                    log.exception("link.callback_failed", state=state.value)
        self._changes.happened()

    def _check(self) -> None:
        if self._failure is not None:
            raise PeerAway(self._failure.message) from self._failure

    async def _stop(self) -> None:
        self._arm_deadline(None)
        if self._current is not None:
            self._discard(self._current)
            self._current = None
        if self._watch is not None:
            self._watch.close()
        self._plan_direct(is_relayed=False)
        tasks = list(self._attempts.values())
        self._attempts.clear()
        tasks += [task for task in (self._seeker, self._asking) if task is not None]
        self._seeker = self._asking = None
        for task in tasks:
            task.cancel()
        waiting = {*tasks, *self._closing}
        if waiting:
            await asyncio.wait(waiting, timeout=limits.LINK_CLOSE_SECONDS)
