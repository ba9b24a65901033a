"""From a link that is up to layers that are loaded: offer, answer, plan, fetch, load, ready.

Each side plans its memory before it says its part of the agreement, so that what does not fit is refused, and how much
context fits both is known, before a byte of the layers is fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from peerllm.daemon.agreement import (
    check_own_range,
    check_plan,
    check_same_model,
    chosen_devices,
    free_bytes,
    make_plan,
    offered_dtypes,
)
from peerllm.daemon.boundary import Boundary
from peerllm.daemon.channel import MessageChannel
from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.engine import Engine
from peerllm.daemon.events import Person, Progress
from peerllm.protocol import limits
from peerllm.protocol.errors import (
    DownloadNeeded,
    DraftMismatch,
    ModelNotFound,
    NotEnoughMemory,
    PeerAway,
    PeerllmError,
    ProtocolError,
    error_from_code,
)
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.identity import INT8, UNQUANTISED, LayerRange, ModelIdentity
from peerllm.protocol.messages import Answer, Loading, Message, Offer, Plan, Ready, Refusal
from peerllm.protocol.tensors import DTYPE_BYTES

log = structlog.get_logger(__name__)

_M = TypeVar("_M", bound=Message)

_SILENCE_SECONDS = 30.0
"""A peer that says nothing for so long while the two agree or load is gone; Loading stops the clock."""
_SAY_LOADING_SECONDS = 1.0
_ABOUT_THE_WHOLE_MODEL = ("describe", "find")
"""Ops that ask for leave to download all of a model's weights; a yes covers every later fetch of its layers."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both sides run now."""

    model: str
    layers: LayerRange
    their_layers: LayerRange
    all_layers: int
    boundary: Boundary
    max_context: int
    """What the model was made for; the boundary's may be less."""
    weights: str = UNQUANTISED
    their_weights: str = UNQUANTISED
    """What each side runs its layers' weights as."""

    @property
    def is_drafting(self) -> bool:
        return self.layers.first == 0


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the worker holds."""

    tensors: str
    layers: LayerRange
    dtype: str
    codec: str
    context: int
    is_context_named: bool = field(compare=False)

    def fitting(self, wanted: _Loaded) -> int | None:
        """The context that it has for `wanted`, where that is the same but for the context; None: plan anew.

        A context that memory decided stays what it was, so that answers in the making outlive the other side's process.
        """
        if replace(wanted, context=self.context) != self:
            return None
        if wanted.context <= self.context:
            return wanted.context
        return None if wanted.is_context_named or self.is_context_named else self.context


class Setup:
    """One peer's side of agreeing and loading. `describe` first; then `agree` for each peer process that comes."""

    def __init__(self, config: DaemonConfig, engine: Engine, person: Person) -> None:
        self._config = config
        self._engine = engine
        self._person = person
        self._machine: dict[str, Any] = {}
        self._model: dict[str, Any] | None = None
        self._progress = Progress("starting", 0.0)
        self._is_download_allowed = config.is_download_allowed
        self._loaded: _Loaded | None = None

    def progressed(self, stage: str, fraction: float) -> None:
        """The worker reports; the person sees it, and the other peer is told while it waits."""
        self._progress = Progress(stage, min(1.0, max(0.0, fraction)))
        self._person.tell(self._progress)

    async def describe(self) -> None:
        """Finds the model that the user named, so that what is wrong with it is said before a room is opened.

        Raises:
            PeerllmError: not found, not supported, the download was declined.
        """
        self._machine = (await self._engine.call("machine")).values
        self._devices(), self._draft_device()  # one that is not there is said now
        if self._config.model is not None:
            self._model = await self._with_download(
                "describe", model=self._config.model, revision=self._config.revision
            )
            if self._config.layers is not None:
                check_own_range(self._config.layers, int(self._model["layers"]))
        kind, _, draft = self._config.draft.partition(":")
        if kind == "model":
            try:
                is_here = self._model is not None and not self._model["download_bytes"]
                target = self._model["folder"] if self._model is not None and is_here else None
                await self._engine.call("check_draft", folder=draft, target=target)
            except PeerllmError as error:
                raise DraftMismatch(f"--draft {self._config.draft}: {error.message}") from None
        if self._model is not None:
            await self._check_memory(self._model)

    async def agree(self, channel: MessageChannel, *, is_opener: bool, offer: Offer | None = None) -> Agreed:
        """Both sides end with the same plan and their layers loaded, or with the same refusal.

        Args:
            offer: the opener's, where it has come already.

        Raises:
            PeerllmError: the reason; the other side was told.
        """
        try:
            if is_opener:
                offer, answer, plan = await self._as_opener(channel)
                their_weights = answer.identity.weights
                mine, theirs = plan.opener_layers, plan.joiner_layers
            else:
                offer, answer, plan = await self._as_joiner(channel, offer)
                their_weights = offer.identity.weights
                mine, theirs = plan.joiner_layers, plan.opener_layers
            width = await self._load(channel, offer, answer, plan, mine)
        except PeerAway:
            raise
        except PeerllmError as error:
            if not isinstance(error, _Refused):
                with contextlib.suppress(PeerAway):
                    await channel.send(Refusal.of(error))
                raise
            raise error.reason from None
        return Agreed(
            model=offer.name,
            layers=mine,
            their_layers=theirs,
            all_layers=offer.identity.layers,
            boundary=Boundary(offer.codec, plan.dtype, width, plan.context),
            max_context=int(self._found["max_context"]),
            weights=self._weights,
            their_weights=their_weights,
        )

    async def _as_opener(self, channel: MessageChannel) -> tuple[Offer, Answer, Plan]:
        if self._model is None:
            raise ModelNotFound("the one who opens a room names the model: peerllm up --model M")
        model = self._model
        offer = Offer(
            name=model["name"],
            source=model["source"],
            revision=model["revision"],
            identity=replace(from_map(ModelIdentity, model["identity"]), weights=self._weights),
            codec=self._config.codec,
            dtypes=offered_dtypes(self._machine, self._config.dtype, self._devices()),
            layers=self._config.layers,
            free_bytes=free_bytes(self._devices()),
            context=self._context(model),
            is_context_named=self._config.context is not None,
        )
        await channel.send(offer)
        answer = await self._expect(channel, Answer)
        plan = make_plan(offer, answer)
        async with self._saying_loading(channel):
            plan = replace(plan, context=await self._fitting(offer, answer, plan, plan.opener_layers))
        await channel.send(plan)
        return offer, answer, plan

    async def _as_joiner(self, channel: MessageChannel, offer: Offer | None) -> tuple[Offer, Answer, Plan]:
        if offer is None:
            offer = await self._expect(channel, Offer)
        async with self._saying_loading(channel):
            model = self._model or await self._with_download(
                "find", identity=to_map(offer.identity), source=offer.source, revision=offer.revision
            )
        self._model = model
        identity = replace(from_map(ModelIdentity, model["identity"]), weights=self._weights)
        check_same_model(identity, offer.identity, offer.name)
        answer = Answer(
            identity=identity,
            dtypes=offered_dtypes(self._machine, self._config.dtype, self._devices()),
            layers=self._config.layers,
            free_bytes=free_bytes(self._devices()),
            context=self._context(model),
            is_context_named=self._config.context is not None,
        )
        expected = make_plan(offer, answer)  # what cannot work is refused here too, in the same words
        async with self._saying_loading(channel):
            fitting = await self._fitting(offer, answer, expected, expected.joiner_layers)
        answer = replace(answer, context=fitting)
        await channel.send(answer)
        plan = await self._expect(channel, Plan)
        check_plan(plan, offer, answer)
        return offer, answer, plan

    async def _check_memory(self, model: dict[str, Any]) -> None:
        """What cannot fit whoever the other peer is, is said before there is one. Raises NotEnoughMemory."""
        layers = int(model["layers"])
        # In the dtype that takes the least: which one it will be is not known yet.
        able = offered_dtypes(self._machine, self._config.dtype, self._devices())
        dtype = min(able, key=lambda each: DTYPE_BYTES[each])
        named = self._config.layers
        # Without a name it is one end of the model at least, and which one is not known either.
        ranges = [LayerRange(0, 1), LayerRange(layers - 1, layers)] if named is None else [named]
        refused: list[NotEnoughMemory] = []
        for each in ranges:
            try:
                await self._engine.plan(
                    **self._held(model["folder"], each, dtype),
                    context=self._context(model),
                    is_context_named=self._config.context is not None,
                )
            except NotEnoughMemory as error:
                refused.append(error)
        if len(refused) == len(ranges):
            raise refused[0]

    async def _fitting(self, offer: Offer, answer: Answer, plan: Plan, mine: LayerRange) -> int:
        """Up to the plan's context, the largest for which this side has memory beside its layers.

        Raises:
            NotEnoughMemory: too little, or one of the two users named a context that does not fit here.
        """
        wanted = _to_load(offer, answer, plan, mine)
        if self._loaded is not None and (loaded := self._loaded.fitting(wanted)) is not None:
            return loaded
        held = self._held(self._found["folder"], mine, plan.dtype)
        # Planning gives up what the worker holds: a link lost meanwhile must not leave it claimed.
        self._loaded = None
        found = await self._engine.plan(**held, context=plan.context, is_context_named=wanted.is_context_named)
        context = int(found["context"])
        log.info("memory_planned", layers=str(mine), context=context, wanted=plan.context, devices=found["words"])
        self.progressed(f"a context of {context} fits layers {mine}", 0.0)
        return context

    def _held(self, folder: str, layers: LayerRange, dtype: str) -> dict[str, Any]:
        """What this peer is to hold, as `plan` and `load` are asked for it."""
        return {
            "folder": folder,
            "layers": [layers.first, layers.last],
            "dtype": dtype,
            "devices": [device["device"] for device in self._devices()],
            "draft_device": self._draft_device(),
            "draft": self._config.draft if layers.first == 0 else "none",
            "weights": self._weights,
        }

    async def _load(self, channel: MessageChannel, offer: Offer, answer: Answer, plan: Plan, mine: LayerRange) -> int:
        """Fetches and loads this side's layers, and waits for the other side's. Gives the hidden size."""
        wanted = _to_load(offer, answer, plan, mine)
        loading = asyncio.create_task(self._expect(channel, Ready), name="wait-for-ready")
        try:
            async with self._saying_loading(channel):
                if self._loaded != wanted or self._engine.loaded is None:
                    self._loaded = None
                    await self._fetch_and_load(offer, plan, mine)
                    self._loaded = wanted
            await channel.send(Ready(context=plan.context))
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        return int(self._found["hidden_size"])

    async def _fetch_and_load(self, offer: Offer, plan: Plan, mine: LayerRange) -> None:
        model = self._found
        folder = model["folder"]
        if model["download_bytes"]:
            fetched = await self._with_download(
                "fetch", model=model["source"] or folder, revision=model["revision"], layers=[mine.first, mine.last]
            )
            folder = fetched["folder"]
        loaded = await self._engine.load(
            **self._held(folder, mine, plan.dtype),
            threads=self._config.threads,
            context=plan.context,
            codec=offer.codec,
        )
        log.info("layers_loaded", layers=str(mine), seconds=loaded.get("seconds"))

    @property
    def _found(self) -> dict[str, Any]:
        """The model, once it was described or found."""
        if self._model is None:
            raise RuntimeError("nothing was described")
        return self._model

    @property
    def _weights(self) -> str:
        return INT8 if self._config.weights == INT8 else UNQUANTISED

    def _devices(self) -> list[dict[str, Any]]:
        return chosen_devices(self._machine, self._config.devices)

    def _draft_device(self) -> str | None:
        wanted = self._config.draft_device
        return None if wanted is None else str(chosen_devices(self._machine, (wanted,))[0]["device"])

    def _context(self, model: dict[str, Any]) -> int:
        most = int(model["max_context"])
        return min(self._config.context or most, most)

    async def _with_download(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Calls `op`; where weights would have to be downloaded, asks the person first."""
        try:
            return (await self._engine.call(op, allow_download=self._is_download_allowed, **arguments)).values
        except DownloadNeeded as error:
            self._progress = Progress("waiting for leave to download", 0.0)
            if not await self._person.may_download(error.message):
                raise ModelNotFound(f"{error.message}; nobody here agreed to the download (--yes does)") from None
        self._is_download_allowed |= op in _ABOUT_THE_WHOLE_MODEL
        return (await self._engine.call(op, allow_download=True, **arguments)).values

    async def _expect(self, channel: MessageChannel, kind: type[_M]) -> _M:
        """The next message of this kind; a Refusal ends the agreement, Loading stops the clock."""
        while True:
            try:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    message: Message = await channel.receive()
            except TimeoutError:
                raise PeerAway(f"the other peer said nothing for {_SILENCE_SECONDS:.0f} s") from None
            if isinstance(message, kind):
                return message
            if isinstance(message, Refusal) and message.session is None and message.request is None:
                raise _Refused(error_from_code(message.code, f"the other peer says: {message.reason}", message.param))
            if isinstance(message, Offer | Answer | Plan):
                raise ProtocolError(f"the other peer sent {type(message).__name__} out of turn")

    @contextlib.asynccontextmanager
    async def _saying_loading(self, channel: MessageChannel) -> AsyncIterator[None]:
        """While the body runs, the other peer hears every second that this one is busy."""

        async def say() -> None:
            while True:
                stage = self._progress.stage[: limits.MAX_NAME_CHARS]
                await channel.send(Loading(stage=stage, fraction=self._progress.fraction))
                await asyncio.sleep(_SAY_LOADING_SECONDS)

        saying = asyncio.create_task(say(), name="say-loading")
        try:
            yield
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


def _to_load(offer: Offer, answer: Answer, plan: Plan, mine: LayerRange) -> _Loaded:
    is_named = offer.is_context_named or answer.is_context_named
    return _Loaded(offer.identity.tensors, mine, plan.dtype, offer.codec, plan.context, is_named)


class _Refused(PeerllmError):
    """The other side said no: it is not to be told again."""

    def __init__(self, reason: PeerllmError) -> None:
        super().__init__(reason.message)
        self.reason = reason
