"""One peer's place at a rendezvous: a connection to the signaling server that is kept, probed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, PeerllmError, RoomClosed, SignalingUnreachable
from peerllm.rooms import keys, server
from peerllm.rooms.servers import IceServers

log = structlog.get_logger(__name__)

_NEW_DAY_CHECK_SECONDS = 3600.0
_SECONDS_A_DAY = 86400


class Listener(Protocol):
    """What a rendezvous tells. All of it returns at once."""

    def on_frame(self, frame: bytes) -> list[bytes]:
        """From the other peer, or from whoever stands between. Gives frames to answer with."""

    def on_presence(self, is_present: bool) -> None:
        """The other peer came, anew if it was there, or it left."""

    def on_change(self) -> None:
        """Anything changed."""

    def on_end(self, error: PeerllmError) -> None:
        """This place is gone for good."""


class Rendezvous:
    """`start` begins to keep a connection, `close` ends it.

    Args:
        side: 0 or 1; the server pairs the two, and a newer connection on a side evicts the older.
        ids: the identifiers at which the two meet, by Unix time.
    """

    def __init__(
        self,
        url: str,
        side: int,
        ids: Callable[[float], tuple[bytes, ...]],
        listener: Listener,
        *,
        insecure: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self.clock = clock
        self.socket: server.ServerSocket | None = None
        """None until the server has taken us in."""
        self.presence = 0
        """Counts the other peer's arrivals: a change says that it has a connection that saw nothing of ours."""
        self.is_present = False
        self.ice_servers = IceServers()
        self.trouble: SignalingUnreachable | None = None
        """Why there is no connection at the moment."""
        self._side = side
        self._ids = ids
        self._listener = listener
        self._insecure = insecure
        self._is_over = False
        self._suspicion = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def can_talk(self) -> bool:
        return self.is_present and self.socket is not None

    @property
    def is_running(self) -> bool:
        return self._runner is not None and not self._runner.done()

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="rendezvous")

    async def post(self, frame: bytes) -> None:
        """To the other peer. Raises PeerAway."""
        if self.socket is None or not self.is_present:
            raise PeerAway("The other peer is not at the signaling server.")
        try:
            await self.socket.send(frame)
        except SignalingUnreachable as error:
            raise PeerAway("The connection to the signaling server was lost.") from error

    def suspect(self) -> None:
        """Probes the connection at once, and replaces it unless it answers within SIGNALING_PROBE_SECONDS."""
        self._suspicion.set()

    def suspect_if_quiet(self) -> None:
        """`suspect`, unless something was heard just now."""
        if self.socket is not None and time.monotonic() - self.socket.heard_at > limits.SIGNALING_PROBE_SECONDS:
            self.suspect()

    async def renew_turn(self) -> None:
        """Asks for fresh TURN credentials. Done by itself before they end."""
        if self.socket is not None and self.is_present:
            with contextlib.suppress(SignalingUnreachable):
                await self.socket.say("turn")

    async def close(self) -> None:
        self._is_over = True
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- One connection after another ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        lost_at = time.monotonic()
        try:
            while not self._is_over:
                begun, waited = time.monotonic(), 0.0
                is_eager = begun - lost_at < limits.SIGNALING_EAGER_SECONDS
                stagger = limits.SIGNALING_STAGGER_SECONDS if is_eager else limits.SIGNALING_CONNECT_SECONDS
                try:
                    socket = await server.reconnect(self.url, insecure=self._insecure, stagger=stagger)
                except SignalingUnreachable as error:
                    self.trouble = error
                    waited = time.monotonic() - begun
                else:
                    failures = 0 if await self._attend(socket) else failures
                    lost_at = time.monotonic()
                if not self._is_over:
                    pause = _nth(limits.SIGNALING_RETRY_SECONDS, failures) * random.uniform(0.5, 1)
                    failures += 1
                    await asyncio.sleep(max(0.0, pause - waited))  # silence was pause enough
        except PeerllmError as error:
            self._end(error)
        except Exception as error:
            log.exception("rendezvous.broke")
            self._end(RoomClosed(f"An internal error ended the meeting: {error!r}. Start peerllm again."))

    async def _attend(self, socket: server.ServerSocket) -> bool:
        """For the life of one socket. Whether it was ever of use."""
        was_useful = False
        probing = asyncio.create_task(self._probe(socket))
        days = asyncio.create_task(self._follow_days(socket))
        reader = asyncio.create_task(self._read(socket))
        try:
            await self.meet(socket)
            await asyncio.wait([reader, probing], return_when=asyncio.FIRST_COMPLETED)
            was_useful = self.socket is socket
            if reader.done():
                reader.result()
        except SignalingUnreachable as error:
            self.trouble = error
        finally:
            self.socket = None
            self._forget_renewal()
            self._left()
            for task in (probing, days, reader):
                task.cancel()
            # A half-open socket takes a second to close: the next is not kept waiting for that. Before anything is
            # awaited here: `close` may cancel this just now.
            self._spawn(socket.close())
            await asyncio.gather(probing, days, reader, return_exceptions=True)
        return was_useful

    async def meet(self, socket: server.ServerSocket) -> None:
        """Takes this peer's place at today's identifiers."""
        await socket.say("meet", side=self._side, ids=[each.hex() for each in self._ids(self.clock())])

    async def _follow_days(self, socket: server.ServerSocket) -> None:
        """A new day has a new rendezvous."""
        while True:
            day = self.clock() // _SECONDS_A_DAY
            await asyncio.sleep(min(_NEW_DAY_CHECK_SECONDS, keys.seconds_to_next_day(self.clock()) + 1))
            if self.clock() // _SECONDS_A_DAY != day:
                await self.meet(socket)

    async def _probe(self, socket: server.ServerSocket) -> None:
        """Ends when the socket is found to be half open."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            if not await socket.is_alive(limits.SIGNALING_PROBE_SECONDS):
                return

    async def _read(self, socket: server.ServerSocket) -> None:
        while True:
            message = await socket.receive()
            if isinstance(message, dict):
                self._control(socket, message)
            else:
                for frame in self._listener.on_frame(message):
                    await socket.send(frame)
            self._listener.on_change()

    def _control(self, socket: server.ServerSocket, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "meeting":
            self.socket = socket
            self.trouble = None
            self.ice_servers = self.ice_servers.with_stun(self.url, message)
        elif op == "present" and self.socket is socket:
            self._take_turn(message)
            self.presence += 1
            self.is_present = True
            self._listener.on_presence(True)
        elif op == "turn":
            self._take_turn(message)
        elif op == "away":
            self._left()
        elif op == "evicted":
            # No coming back: two daemons with one key would evict each other for ever.
            self._end(
                RoomClosed("Another daemon with this peer's key came to the rendezvous and took this one's place.")
            )
        elif op == "error" and message.get("code") != "unknown_op":  # that one ends nothing
            error = server.error_of(message.get("code"))
            if isinstance(error, server.NotUnderstood):
                raise RoomClosed(error.message)
            raise SignalingUnreachable(error.message)

    def _take_turn(self, message: dict[str, Any]) -> None:
        """Credentials end; fresh ones are asked for before that."""
        now = time.monotonic()
        self.ice_servers = self.ice_servers.with_turn(message, now)
        self._forget_renewal()
        if self.ice_servers.turn is not None:
            seconds = max(1.0, (self.ice_servers.turn.ends_at - now) * limits.TURN_RENEWED_AFTER)
            self._renewal = asyncio.get_running_loop().call_later(seconds, self._renew_soon)

    def _renew_soon(self) -> None:
        self._spawn(self.renew_turn())

    def _forget_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _left(self) -> None:
        self.is_present = False
        self._listener.on_presence(False)
        self._listener.on_change()

    def _end(self, error: PeerllmError) -> None:
        self._is_over = True
        self._listener.on_end(error)


def _nth(values: tuple[float, ...], index: int) -> float:
    return values[min(index, len(values) - 1)]
