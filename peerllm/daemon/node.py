"""The daemon: one room, one peer, one engine, one socket, put together. It is the API's backend."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import structlog

from peerllm import __version__
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.drafter import Drafter
from peerllm.daemon.engine import Engine
from peerllm.daemon.events import Connected, PeerSeated, Person, RoomOpened, Serving, Trouble
from peerllm.daemon.remote import RemoteAnswers, RemoteRequests
from peerllm.daemon.request_queue import RequestQueue
from peerllm.daemon.setup import Agreed, Setup
from peerllm.daemon.verifier import Verifier
from peerllm.link import Link, LinkConfig, LinkState
from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import PeerAway, PeerllmError, ProtocolError, RoomIncomplete
from peerllm.protocol.messages import Loading, Message, Offer, Ready, Refusal
from peerllm.protocol.requests import Event, GenerateRequest, ModelInfo
from peerllm.rooms import RoomClient, SeatedPeer
from peerllm.telemetry.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

_MAX_HELLO_BYTES = 4 * limits.KIB
_VERIFIER_SESSIONS = 4
_LINGER_SECONDS = 1.0


class _PeerRestarted(Exception):
    """The other side is a new process: what was agreed with the old one is void."""


class Node:
    """`run` until it is cancelled or something ends it for good; the API asks it meanwhile."""

    def __init__(self, config: DaemonConfig, person: Person, *, watchdog: LoopWatchdog) -> None:
        self._config = config
        self._person = person
        self._watchdog = watchdog
        self._instance = secrets.token_hex(8)
        self._their_instance: str | None = None
        self._engine = Engine(
            on_progress=lambda stage, fraction: self._setup.progressed(stage, fraction),
            on_lost=self._engine_lost,
            on_restored=self._engine_restored,
        )
        self._setup = Setup(config, self._engine, person)
        self._queue = RequestQueue()
        self._state = "starting"
        self._is_peer_ready = False
        self._agreed: Agreed | None = None
        self._link: Link | None = None
        self._channel: MessageChannel | None = None
        self._drafter: Drafter | None = None
        self._verifier: Verifier | None = None
        self._remote_requests: RemoteRequests | None = None
        self._remote_answers: RemoteAnswers | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- Life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Opens or joins the room, and serves it.

        Raises:
            PeerllmError: why it cannot go on.
        """
        await self._engine.start()
        await self._setup.describe()
        peer = await self._meet()
        self._state = "connecting"
        self._link = link = Link(peer, self._link_config(), hello=self._hello, on_hello=self._their_hello)
        link.on_state = self._link_state_changed
        await link.start()
        stats = link.stats()
        self._person.tell(Connected(stats.path, stats.rtt_ms))
        self._channel = MessageChannel(link)
        while True:
            self._state = "loading"
            try:
                agreed = await self._setup.agree(self._channel, is_opener=peer.is_opener)
            except PeerllmError:
                await self._linger()
                raise
            try:
                await self._serve(agreed, self._channel)
            except _PeerRestarted:
                self._person.tell(Trouble("the other peer started anew; agreeing again"))

    async def close(self) -> None:
        """Ends everything that `run` began; at most 2 s."""
        self._state = "stopping"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(
            self._engine.close(), *([self._link.close()] if self._link is not None else []), return_exceptions=True
        )

    async def _linger(self) -> None:
        """Leaves the other side a moment to hear why, before the link closes under the words."""
        if self._channel is not None:
            with contextlib.suppress(TimeoutError, PeerAway):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while True:
                        await self._channel.receive()

    async def _meet(self) -> SeatedPeer:
        client = RoomClient(self._config.signaling, self._config.state_dir, insecure=self._config.is_insecure)
        self._state = "waiting"
        if self._config.room_code is not None:
            peer = await client.join(self._config.room_code)
        else:
            room = await client.open()
            self._person.tell(RoomOpened(str(room.code)))
            peer = await room.admit()
        self._person.tell(PeerSeated())
        return peer

    def _link_config(self) -> LinkConfig:
        return LinkConfig(
            loopback=self._config.is_loopback,
            added_rtt_ms=self._config.added_rtt_ms,
        )

    async def _serve(self, agreed: Agreed, channel: MessageChannel) -> None:
        """Until the link is down for good (PeerAway) or the other side starts anew (_PeerRestarted)."""
        self._agreed = agreed
        self._is_peer_ready = True
        judging: asyncio.Task[None] | None = None
        if agreed.is_drafting:
            self._drafter = Drafter(self._engine, channel, agreed.boundary, draft_length=self._config.draft_length)
            self._remote_answers = RemoteAnswers(channel, self.generate)
        else:
            self._verifier = Verifier(self._engine, channel, agreed.boundary, max_sessions=_VERIFIER_SESSIONS)
            self._remote_requests = RemoteRequests(channel)
            judging = self._spawn(self._verifier.run(), "verifier")
        self._state = "ready"
        self._person.tell(
            Serving(agreed.model, agreed.layers, agreed.all_layers, agreed.is_drafting, agreed.boundary.context)
        )
        try:
            await channel.run(self._take)
        finally:
            error = PeerAway("the other peer went away")
            self._fail_answers(error)
            if self._remote_answers is not None:
                await self._remote_answers.close()
            if judging is not None:
                judging.cancel()
            self._drafter = self._verifier = self._remote_requests = self._remote_answers = None
            self._agreed = None
            self._state = "away"

    async def _take(self, message: Message) -> None:
        if isinstance(message, Offer):
            raise _PeerRestarted
        if isinstance(message, Loading):
            self._is_peer_ready = False
        elif isinstance(message, Ready):
            self._is_peer_ready = True
        elif self._drafter is not None and self._remote_answers is not None:
            self._drafter.take(message)
            await self._remote_answers.take(message)
        elif self._verifier is not None and self._remote_requests is not None:
            self._remote_requests.take(message)
            await self._verifier.take(message)
        if isinstance(message, Refusal) and message.session is None and message.request is None:
            log.warning("peer_refused", error=message.code, reason=message.reason)

    # --- What happens on the way -----------------------------------------------------------------------------------

    def _hello(self) -> bytes:
        return cbor.encode({"release": __version__, "instance": self._instance})

    def _their_hello(self, body: bytes) -> None:
        value = cbor.decode(body, max_bytes=_MAX_HELLO_BYTES)
        instance = value.get("instance") if isinstance(value, dict) else None
        if not isinstance(instance, str):
            raise ProtocolError("the other peer's greeting lacks its instance")
        self._their_instance = instance

    def _link_state_changed(self, state: LinkState) -> None:
        log.info("link_state", state=state.name)
        if state is LinkState.UP and self._drafter is not None:
            self._drafter.link_is_up_again()

    def _engine_lost(self, error: PeerllmError) -> None:
        self._person.tell(Trouble(error.message))
        self._fail_answers(error, remote=False)
        if self._verifier is not None:
            self._spawn(self._verifier.fail_sessions(error), "fail-sessions")
        self._tell_peer(Loading(stage="restarting the engine", fraction=0.0))

    def _engine_restored(self) -> None:
        if self._agreed is not None:
            self._tell_peer(Ready(context=self._agreed.boundary.context))

    def _tell_peer(self, message: Message) -> None:
        if self._channel is not None and self._agreed is not None:
            self._spawn(_quietly(self._channel.send(message)), "tell-peer")

    def _fail_answers(self, error: PeerllmError, *, remote: bool = True) -> None:
        if self._drafter is not None:
            self._drafter.fail(error)
        if remote and self._remote_requests is not None:
            self._remote_requests.fail(error)

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), error=repr(error))

    # --- The API's backend -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See api.Backend. Requests of both peers' users wait in one queue, at the drafting peer."""
        self._check_ready()
        if self._remote_requests is not None:
            async with contextlib.aclosing(self._remote_requests.generate(request)) as events:
                async for event in events:
                    yield event
            return
        async with self._queue.turn():
            self._check_ready()
            if self._drafter is None:
                raise PeerAway("the other peer went away while the request waited")
            async with contextlib.aclosing(self._drafter.generate(request)) as events:
                async for event in events:
                    yield event

    def _check_ready(self) -> None:
        """Raises RoomIncomplete or PeerAway, in words, unless an answer can be made now."""
        well, cause = self.health()
        if not well:
            raise (PeerAway if self._agreed is not None or self._state == "away" else RoomIncomplete)(cause)

    def models(self) -> list[ModelInfo]:
        agreed = self._agreed
        if agreed is None:
            return []
        return [ModelInfo(name=agreed.model, context_length=agreed.boundary.context)]

    def health(self) -> tuple[bool, str]:
        words = {
            "starting": "the engine is starting",
            "waiting": "nobody has joined the room yet",
            "connecting": "the link to the other peer is being made",
            "loading": "the layers are being loaded",
            "away": "the other peer is away",
            "stopping": "the daemon is stopping",
        }
        if self._state in words:
            return False, words[self._state]
        if self._engine.state != "ready":
            return False, "the engine worker is being restarted"
        beat_age = self._engine.beat_age
        if beat_age is None or beat_age > limits.SUSPECT_SECONDS:
            return False, "the engine worker is silent"
        if self._link is None or self._link.state is not LinkState.UP:
            return False, "the link to the other peer is down"
        if not self._is_peer_ready:
            return False, "the other peer is loading its layers"
        return True, "ready"

    def status(self) -> dict[str, Any]:
        agreed, link = self._agreed, self._link
        well, cause = self.health()
        stats = None if link is None else link.stats()
        status: dict[str, Any] = {
            "release": __version__,
            "state": self._state,
            "health": {"well": well, "cause": cause},
            "worker": {
                "state": self._engine.state,
                "pid": self._engine.pid,
                "beat_age_s": self._engine.beat_age,
                "restarts": self._engine.restarts,
            },
            "loop": self._watchdog.summary(),
            "queue": {"waiting": self._queue.waiting, "active": self._queue.active},
            "link": None
            if stats is None
            else {
                "state": stats.state.name,
                "path": stats.path,
                "rtt_ms": stats.rtt_ms,
                "epoch": stats.epoch,
                "bytes_sent": stats.bytes_sent,
                "bytes_received": stats.bytes_received,
                "retransmitted": stats.retransmitted,
            },
            "model": None,
            "peers": [],
            "ledger": None if self._drafter is None else self._drafter.ledger.summary(),
        }
        if agreed is not None:
            boundary = agreed.boundary
            status["model"] = {
                "name": agreed.model,
                "layers": agreed.all_layers,
                "codec": boundary.codec,
                "dtype": boundary.dtype,
                "context": boundary.context,
            }
            status["peers"] = [
                {"self": True, "layers": str(agreed.layers), "drafting": agreed.is_drafting},
                {"self": False, "layers": str(agreed.their_layers), "drafting": not agreed.is_drafting},
            ]
        return status


async def _quietly(sending: Any) -> None:
    with contextlib.suppress(PeerAway):
        await sending
