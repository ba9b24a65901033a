"""The daemon: one room, one peer, one engine, one socket, put together. It is the API's backend."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import structlog

from peerllm import __version__
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.engine import Engine
from peerllm.daemon.events import Connected, Person, Progress, ReadyToServe, Trouble
from peerllm.daemon.meeting import make_link, meet
from peerllm.daemon.serving import Serving
from peerllm.daemon.settings import remember_settings
from peerllm.daemon.setup import Agreed, Setup
from peerllm.link import Link, LinkState
from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import PeerAway, PeerllmError, ProtocolError, RoomIncomplete
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.messages import Leaving, Loading, Message, Offer, Ready, Refusal
from peerllm.protocol.requests import Event, GenerateRequest, ModelInfo
from peerllm.rooms import Room, SeatedPeer
from peerllm.telemetry.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

_MAX_HELLO_BYTES = 4 * limits.KIB
_LINGER_SECONDS = 1.0
_GOODBYE_SECONDS = 0.5


class _PeerRestarted(Exception):
    """The other side is a new process: what was agreed with the old one is void. `offer`: it has begun to agree."""

    def __init__(self, offer: Offer | None) -> None:
        super().__init__()
        self.offer = offer


class Node:
    """`run` until it is cancelled or something ends it for good; the API asks it meanwhile."""

    def __init__(self, config: DaemonConfig, person: Person, *, watchdog: LoopWatchdog) -> None:
        self._config = config
        self._person = person
        self._watchdog = watchdog
        self._instance = secrets.token_hex(8)
        self._their_instance: str | None = None
        self._is_peer_new = asyncio.Event()
        self._engine = Engine(
            on_progress=lambda stage, fraction: self._setup.progressed(stage, fraction),
            on_lost=self._engine_lost,
            on_restored=self._engine_restored,
        )
        self._setup = Setup(config, self._engine, person)
        self._state = "starting"
        self._is_peer_ready = False
        self._peer: SeatedPeer | None = None
        self._room: Room | None = None
        self._link: Link | None = None
        self._channel: MessageChannel | None = None
        self._serving: Serving | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- Life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Opens, joins or resumes the room, and serves it.

        Raises:
            PeerllmError: why it cannot go on.
        """
        self._person.tell(Progress("starting the engine", 0.0))
        await self._engine.start()
        await self._setup.describe()
        self._state = "waiting"
        peer, self._room = await meet(self._config, self._person.tell)
        self._peer = peer
        await asyncio.to_thread(remember_settings, self._config, peer.room_name)
        has_served = self._config.resume is not None
        while True:
            self._state = "away" if has_served else "connecting"
            try:
                channel = await self._connect(peer)
                await self._agree_and_serve(channel, is_opener=peer.is_opener)
            except PeerAway as error:
                # The peer may be back in a minute or tomorrow; a first meeting that fails is the person's to mend.
                if not has_served and self._serving is None:
                    raise
                has_served = True
                self._state = "away"
                self._person.tell(Trouble(f"{error.message}. Waiting for it; `peerllm resume` there brings it back."))
                await self._stop_serving(error)
            finally:
                await self._disconnect()

    async def _agree_and_serve(self, channel: MessageChannel, *, is_opener: bool) -> None:
        """Until the link is down for good: raises PeerAway. Raises others for what no new try would mend."""
        offer: Offer | None = None
        while True:
            if self._serving is None:
                self._state = "loading"
            self._is_peer_ready = False
            self._is_peer_new.clear()
            try:
                agreed = await self._setup.agree(channel, is_opener=is_opener, offer=offer)
            except PeerAway:
                raise
            except PeerllmError:
                await self._linger(channel)
                raise
            await self._begin_serving(agreed, channel)
            try:
                await self._serve(channel)
            except _PeerRestarted as restarted:
                offer = restarted.offer
                self._person.tell(Trouble("The other peer's daemon started anew; agreeing again."))

    async def close(self) -> None:
        """Ends everything that `run` began; at most 2 s."""
        self._state = "stopping"
        await self._stop_serving(PeerAway("the daemon is stopping"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [self._engine.close()]
        closing += [part.close() for part in (self._link, self._peer, self._room) if part is not None]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _say_goodbye(self) -> None:
        link = self._link
        if self._channel is not None and link is not None and link.state is LinkState.UP:
            with contextlib.suppress(PeerAway, TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._channel.send(Leaving())
                    await asyncio.sleep(2 * (link.stats().rtt_ms or 0.0) / 1000)  # until it is surely out

    async def _connect(self, peer: SeatedPeer) -> MessageChannel:
        """Raises PeerAway, NoPath, LinkError, VersionMismatch."""
        link = self._link = make_link(self._config, peer, self._hello, self._their_hello)
        link.on_state = self._link_state_changed
        await link.start()
        stats = link.stats()
        self._person.tell(Connected(stats.path, stats.rtt_ms))
        self._channel = MessageChannel(link)
        return self._channel

    async def _disconnect(self) -> None:
        await self._say_goodbye()
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            await link.close()

    async def _linger(self, channel: MessageChannel) -> None:
        """Leaves the other side a moment to hear why, before the link closes under the words."""
        with contextlib.suppress(TimeoutError, PeerAway):
            async with asyncio.timeout(_LINGER_SECONDS):
                while True:
                    await channel.receive()

    async def _begin_serving(self, agreed: Agreed, channel: MessageChannel) -> None:
        """Goes on with what is being made if the agreement is the old one; else begins anew."""
        self._is_peer_ready = True
        if self._serving is not None and self._serving.agreed == agreed:
            self._serving.link_is_up_again()
        else:
            await self._stop_serving(PeerAway("the other peer came back with another model or other layers"))
            self._serving = Serving(
                agreed,
                self._engine,
                channel,
                self._spawn,
                is_peer_ready=lambda: self._is_peer_ready,
                draft_length=self._config.draft_length,
            )
        self._state = "ready"
        self._person.tell(
            ReadyToServe(
                agreed.model,
                agreed.layers,
                agreed.all_layers,
                agreed.is_drafting,
                agreed.boundary.context,
                agreed.max_context,
            )
        )

    async def _stop_serving(self, error: PeerllmError) -> None:
        if self._serving is not None:
            serving, self._serving = self._serving, None
            await serving.close(error)

    async def _serve(self, channel: MessageChannel) -> None:
        """Until the link is down for good (PeerAway) or the other side starts anew (_PeerRestarted)."""
        receiving = asyncio.create_task(channel.run(self._take), name="receive")
        noticing = asyncio.create_task(self._is_peer_new.wait(), name="notice")
        try:
            await asyncio.wait((receiving, noticing), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                await receiving
            raise _PeerRestarted(None)
        finally:
            for task in (receiving, noticing):
                task.cancel()
            await asyncio.gather(receiving, noticing, return_exceptions=True)

    async def _take(self, message: Message) -> None:
        if isinstance(message, Offer):
            raise _PeerRestarted(message)
        if isinstance(message, Leaving):
            raise PeerAway("The other peer's daemon was stopped")
        if isinstance(message, Loading):
            self._is_peer_ready = False
        elif isinstance(message, Ready):
            self._is_peer_ready = True
        elif self._serving is not None:
            await self._serving.take(message)
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
        if self._their_instance not in (None, instance):
            self._is_peer_new.set()
            self._is_peer_ready = False
            if self._serving is not None:
                self._serving.peer_restarted(PeerAway("the other peer's daemon started anew; ask again"))
        self._their_instance = instance

    def _link_state_changed(self, state: LinkState) -> None:
        log.info("link_state", state=state.name)
        if self._serving is None:
            return
        if state is LinkState.SUSPECT:
            self._person.tell(Trouble("The other peer is silent. Connecting anew; answers wait meanwhile."))
        elif state is LinkState.UP and not self._is_peer_new.is_set():
            self._person.tell(Trouble("The other peer is back."))
            self._serving.link_is_up_again()
            self._tell_state()  # it may have changed unheard while the link was away

    def _engine_lost(self, error: PeerllmError) -> None:
        self._person.tell(Trouble(error.message))
        if self._serving is not None:
            self._serving.engine_lost()
        self._tell_state()

    def _engine_restored(self) -> None:
        self._tell_state()

    def _tell_state(self) -> None:
        """Whether this side's layers are there."""
        if self._serving is None:
            return
        if self._engine.loaded is None:
            self._tell_peer(Loading(stage="restarting the engine", fraction=0.0))
        else:
            self._tell_peer(Ready(context=self._serving.agreed.boundary.context))

    def _tell_peer(self, message: Message) -> None:
        if self._channel is not None and self._serving is not None:
            self._spawn(_quietly(self._channel.send(message)), "tell-peer")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), reason=repr(error))

    # --- The API's backend -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See api.Backend."""
        well, cause = self.health()
        if self._serving is None or not well:
            raise (RoomIncomplete if self._serving is None and self._state != "away" else PeerAway)(cause)
        async with contextlib.aclosing(self._serving.generate(request)) as events:
            async for event in events:
                yield event

    def models(self) -> list[ModelInfo]:
        if self._serving is None:
            return []
        agreed = self._serving.agreed
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
        serving, link = self._serving, self._link
        well, cause = self.health()
        stats = None if link is None else link.stats()
        status: dict[str, Any] = {
            "release": __version__,
            "state": "away"
            if self._state == "ready" and (link is None or link.state is not LinkState.UP)
            else self._state,
            "health": {"well": well, "cause": cause},
            "worker": {
                "state": self._engine.state,
                "pid": self._engine.pid,
                "beat_age_s": self._engine.beat_age,
                "restarts": self._engine.restarts,
            },
            "loop": self._watchdog.summary(),
            "queue": {
                "waiting": 0 if serving is None else serving.queue.waiting,
                "active": 0 if serving is None else serving.queue.active,
            },
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
            "ledger": None if serving is None else serving.ledger,
        }
        if serving is not None:
            agreed, boundary = serving.agreed, serving.agreed.boundary
            status["model"] = {
                "name": agreed.model,
                "layers": agreed.all_layers,
                "codec": boundary.codec,
                "dtype": boundary.dtype,
                "context": boundary.context,
                "max_context": agreed.max_context,
            }
            status["peers"] = [
                _peer(True, agreed.layers, agreed.is_drafting, agreed.weights),
                _peer(False, agreed.their_layers, not agreed.is_drafting, agreed.their_weights),
            ]
            if agreed.is_drafting:
                status["peers"][0]["draft"] = (self._engine.loaded or {}).get("draft")
        return status


def _peer(is_self: bool, layers: LayerRange, is_drafting: bool, weights: str) -> dict[str, Any]:
    return {"self": is_self, "layers": str(layers), "drafting": is_drafting, "weights": weights}


async def _quietly(sending: Any) -> None:
    with contextlib.suppress(PeerAway):
        await sending
