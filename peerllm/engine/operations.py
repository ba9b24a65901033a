"""The worker's operations by name: maps in, maps out, as docs/architecture.md has them. No pipe and no process here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peerllm import models
from peerllm.engine.machine import machine
from peerllm.engine.out_of_memory import give_back, is_out_of_memory
from peerllm.engine.planting import as_whole
from peerllm.engine.results import Prefilled
from peerllm.engine.tokens import Tokens
from peerllm.models.drafts import check_draft, check_target, is_draft, shipped_for
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, EngineError, NotEnoughMemory, ProtocolError
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.identity import UNQUANTISED, LayerRange, ModelIdentity
from peerllm.protocol.requests import ChatMessage, Sampling
from peerllm.protocol.tensors import DTYPE_BYTES

if TYPE_CHECKING:
    from peerllm.engine.engine import Engine
    from peerllm.engine.weights import Progress

Answer = tuple[dict[str, Any], bytes]


class Operations:
    """State between requests: the loaded engine, the tokenizer, the text streams."""

    def __init__(self, *, threads: int | None, progress: Progress) -> None:
        self._threads = threads
        self._progress = progress
        self._engine: Engine | None = None
        self._tokens: Tokens | None = None
        if threads is not None:
            torch.set_num_threads(max(1, threads))
        self._table: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
            "machine": self._machine,
            "describe": self._describe,
            "check_draft": self._check_draft,
            "find": self._find,
            "fetch": self._fetch,
            "plan": self._plan,
            "models": self._models,
            "load": self._load,
            "tokenize": self._tokenize,
            "open": self._open,
            "prefill": self._prefill,
            "draft_block": self._draft_block,
            "verify": self._verify,
            "forward": self._forward,
            "text": self._text,
            "close": self._close,
        }

    def perform(self, op: str, header: dict[str, Any], payload: bytes) -> Answer:
        """One operation.

        Raises:
            PeerllmError: whatever the operation raises; ProtocolError for an unknown one or a field that is missing
                or of the wrong kind; NotEnoughMemory where a device has no more to give.
        """
        handler = self._table.get(op)
        if handler is None:
            raise ProtocolError(f"operation {op[:32]!r} is not known to this worker")
        try:
            return handler(header, payload)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).partition("\n")[0][:500]
            words = f"{op}: memory ran out in spite of the plan ({said})"
        # Outside of the handler: the error's frames hold what was made on the way.
        give_back()
        raise NotEnoughMemory(f"{words}; end what else uses it, or start again with a smaller --context")

    # --- Models -----------------------------------------------------------------------------------------------------

    def _machine(self, header: dict[str, Any], payload: bytes) -> Answer:
        return machine(), b""

    def _describe(self, header: dict[str, Any], payload: bytes) -> Answer:
        found = models.describe(
            _text(header, "model"),
            revision=_optional_text(header, "revision"),
            allow_download=bool(header.get("allow_download", False)),
            progress=self._progress,
        )
        return as_whole(found).to_map(), b""

    def _check_draft(self, header: dict[str, Any], payload: bytes) -> Answer:
        folder, target = _text(header, "folder"), _optional_text(header, "target")
        check_draft(folder)
        if target is not None and is_draft(folder):
            check_target(folder, target, self._progress)
        return {}, b""

    def _find(self, header: dict[str, Any], payload: bytes) -> Answer:
        found = models.find(
            from_map(ModelIdentity, header.get("identity")),
            _optional_text(header, "source"),
            revision=_optional_text(header, "revision"),
            allow_download=bool(header.get("allow_download", False)),
            progress=self._progress,
        )
        return found.to_map(), b""

    def _fetch(self, header: dict[str, Any], payload: bytes) -> Answer:
        folder = models.fetch(
            _text(header, "model"),
            revision=_optional_text(header, "revision"),
            layers=_layers(header),
            allow_download=bool(header.get("allow_download", False)),
            progress=self._progress,
        )
        return {"folder": str(folder)}, b""

    def _models(self, header: dict[str, Any], payload: bytes) -> Answer:
        return {"models": [to_map(each) for each in models.cached_models()]}, b""

    def _plan(self, header: dict[str, Any], payload: bytes) -> Answer:
        from peerllm.engine.memory import plan_load

        self._unload()
        found = plan_load(
            Path(_text(header, "folder")),
            _layers(header),
            **self._held(header),
            is_context_named=bool(header.get("is_context_named", False)),
            is_early=True,
        )
        return {"context": found.context, "words": found.words()}, b""

    def _load(self, header: dict[str, Any], payload: bytes) -> Answer:
        folder = Path(_text(header, "folder"))
        self._unload()
        threads = header.get("threads")
        held = self._held(header)
        # Imported when it is needed: transformers' models take seconds, and a refusal needs none of them.
        from peerllm.engine.engine import Engine

        engine = Engine.load(
            folder,
            _layers(header),
            **held,
            threads=self._threads if threads is None else _uint(header, "threads"),
            wire_codec=_text(header, "codec"),
            progress=self._progress,
        )
        self._tokens = Tokens(folder)
        self._engine = engine
        give_back()
        kind, _, path = held["draft"].partition(":")
        # A draft's folder without the way to it: the status goes to whoever may open the socket.
        drafted_by = (Path(path).name if path else kind) if engine.part.is_first else "none"
        return {**asdict(engine.loaded), **self._tokens.facts(), "draft": drafted_by}, b""

    def _held(self, header: dict[str, Any]) -> dict[str, Any]:
        """What `plan` and `load` are both told of what this peer is to hold, as keywords."""
        draft = _optional_text(header, "draft") or "none"
        if draft == "auto":
            shipped = shipped_for(_text(header, "folder"), self._progress)
            draft = "ngram" if shipped is None else f"model:{shipped}"
        return {
            "dtype": _choice(header, "dtype", tuple(DTYPE_BYTES)),
            "devices": _text_list(header, "devices", ("cpu",)),
            "draft_device": _optional_text(header, "draft_device"),
            "draft": draft,
            "weights": _optional_text(header, "weights") or UNQUANTISED,
            "context": None if header.get("context") is None else _uint(header, "context"),
        }

    def _unload(self) -> None:
        """What was loaded goes before something is planned or loaded: two slices need not fit at once."""
        if self._engine is not None:
            self._engine = self._tokens = None
            give_back()

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _tokenize(self, header: dict[str, Any], payload: bytes) -> Answer:
        tokens = self._need_tokens()
        messages = header.get("messages")
        if messages is None:
            return {"tokens": tokens.encode_prompt(_text(header, "prompt", limits.MAX_API_BODY_BYTES))}, b""
        if type(messages) is not list or len(messages) > limits.MAX_LIST_ITEMS:
            raise ProtocolError("messages are not a list")
        return {"tokens": tokens.encode_chat([from_map(ChatMessage, each) for each in messages])}, b""

    def _text(self, header: dict[str, Any], payload: bytes) -> Answer:
        session = _uint(header, "session")
        texts = self._need_tokens()
        # A piece for each token, so that a stop string ends the count of tokens where it ends the text.
        pieces = [texts.text(session, [token], is_final=False) for token in _token_list(header)]
        flushed = texts.text(session, [], is_final=True) if header.get("final", False) else ""
        return {"pieces": pieces, "text": flushed}, b""

    # --- Rounds -------------------------------------------------------------------------------------------------------

    def _open(self, header: dict[str, Any], payload: bytes) -> Answer:
        session = _uint(header, "session")
        self._need_engine().open(session, from_map(Sampling, header.get("sampling", {})))
        self._need_tokens().forget(session)
        return {}, b""

    def _close(self, header: dict[str, Any], payload: bytes) -> Answer:
        session = _uint(header, "session")
        if self._engine is not None:
            self._engine.close(session)
        if self._tokens is not None:
            self._tokens.forget(session)
        return {}, b""

    def _prefill(self, header: dict[str, Any], payload: bytes) -> Answer:
        engine = self._need_engine()
        session, start = _uint(header, "session"), _uint(header, "start")
        if engine.part.is_first:
            return _prefilled(engine.prefill(session, start, tokens=_token_list(header)))
        return _prefilled(engine.prefill(session, start, rows=_uint(header, "rows"), payload=payload))

    def _forward(self, header: dict[str, Any], payload: bytes) -> Answer:
        engine = self._need_engine()
        return _prefilled(
            engine.forward(_uint(header, "session"), _uint(header, "start"), _uint(header, "rows"), payload)
        )

    def _draft_block(self, header: dict[str, Any], payload: bytes) -> Answer:
        drafted = self._need_engine().draft_block(
            _uint(header, "session"),
            _uint(header, "from"),
            _token_list(header),
            _uint(header, "draft_length"),
            _real(header, "min_probability"),
        )
        answer = {
            "start": drafted.start,
            "candidates": drafted.candidates,
            "probabilities": [round(each, 6) for each in drafted.probabilities],
            "draft_us": drafted.draft_us,
            "layers_us": drafted.layers_us,
            "encode_us": drafted.encode_us,
        }
        return answer, drafted.payload

    def _verify(self, header: dict[str, Any], payload: bytes) -> Answer:
        verified = self._need_engine().verify(
            _uint(header, "session"), _uint(header, "start"), _token_list(header, "candidates"), payload
        )
        return asdict(verified), b""

    # --- Inside -------------------------------------------------------------------------------------------------------

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("no model is loaded in this worker")
        return self._engine

    def _need_tokens(self) -> Tokens:
        if self._tokens is None:
            raise EngineError("no model is loaded in this worker")
        return self._tokens


def _prefilled(done: Prefilled) -> Answer:
    times = {"decode_us": done.decode_us, "layers_us": done.layers_us, "encode_us": done.encode_us}
    return times, done.payload


def _uint(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ProtocolError(f"{name} is not a whole number")
    return value


def _real(header: dict[str, Any], name: str) -> float:
    value = header.get(name, 0.0)
    if type(value) not in (int, float):
        raise ProtocolError(f"{name} is not a number")
    return float(value)


def _text(header: dict[str, Any], name: str, most: int = limits.MAX_TEXT_CHARS) -> str:
    value = header.get(name)
    if type(value) is not str or len(value) > most:
        raise ProtocolError(f"{name} is not text")
    return value


def _choice(header: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = _text(header, name)
    if value not in known:
        raise BadRequest(f"{name} {value[:32]!r} is not one of {', '.join(known)}", param=name)
    return value


def _optional_text(header: dict[str, Any], name: str) -> str | None:
    return None if header.get(name) is None else _text(header, name)


def _text_list(header: dict[str, Any], name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = header.get(name) or list(default)
    if type(value) is not list or not all(type(each) is str for each in value):
        raise ProtocolError(f"{name} is not a list of texts")
    return tuple(value)


def _token_list(header: dict[str, Any], name: str = "tokens") -> list[int]:
    value = header.get(name, [])
    if type(value) is not list or not all(type(each) is int for each in value):
        raise ProtocolError(f"{name} is not a list of tokens")
    return value


def _layers(header: dict[str, Any]) -> LayerRange:
    value = header.get("layers")
    if type(value) is not list or len(value) != 2:
        raise ProtocolError("layers are not [first, last]")
    return from_map(LayerRange, {"first": value[0], "last": value[1]})
