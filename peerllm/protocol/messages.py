"""Typed messages between two peers, after the link is UP. Each is a dataclass of checked fields; on the wire a CBOR map
with `t`, the type's number, and the fields by name. Unknown keys are ignored; an unknown type is an error that is
answered and ends nothing.

Positions are absolute, counted from 0. n, the committed length, is prompt + final tokens; the target's caches hold
n - 1 rows, and row 0 of a candidate block is token n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import PeerllmError, ProtocolError, error_from_code
from peerllm.protocol.fields import (
    blob,
    choice,
    flag,
    from_map,
    nested,
    optional,
    plain_map,
    real,
    text,
    text_list,
    to_map,
    uint,
    uint_list,
)
from peerllm.protocol.identity import LayerRange, ModelIdentity
from peerllm.protocol.requests import GenerateRequest, Sampling
from peerllm.protocol.tensors import CODECS, DTYPE_BYTES

DTYPES = tuple(DTYPE_BYTES)


class UnknownMessage(ProtocolError):
    code = "unknown_message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The root of all messages."""

    TYPE: ClassVar[int] = 0


# --- Agreeing on what to run: opener offers, joiner answers, opener plans, both load, both are ready -----------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """What the peer that opened the room runs. `source` is a hub id or an embedded model's name, never a path."""

    TYPE: ClassVar[int] = 1
    name: str = text(limits.MAX_NAME_CHARS)
    source: str | None = optional(text(limits.MAX_NAME_CHARS))
    revision: str | None = optional(text(limits.MAX_NAME_CHARS))
    identity: ModelIdentity = nested(ModelIdentity)
    codec: str = choice(CODECS)
    dtypes: tuple[str, ...] = text_list(len(DTYPES), 16)
    """What the opener can compute in, best first."""
    layers: LayerRange | None = optional(nested(LayerRange))
    free_bytes: int = uint()
    context: int = uint(limits.MAX_CONTEXT, minimum=1)
    """The most that the opener wants."""
    is_context_named: bool = flag(default=False)
    """Its user named it: where it does not fit, the room is refused and the context not made smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Message):
    """The joiner has the same model. Its own wishes, and what it has room for."""

    TYPE: ClassVar[int] = 2
    identity: ModelIdentity = nested(ModelIdentity)
    dtypes: tuple[str, ...] = text_list(len(DTYPES), 16)
    layers: LayerRange | None = optional(nested(LayerRange))
    free_bytes: int = uint()
    context: int = uint(limits.MAX_CONTEXT, minimum=1)
    """The most that the joiner wants and, beside the layers that follow from both sides' wishes, has memory for."""
    is_context_named: bool = flag(default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Message):
    """The opener's decision: both sides load now. `context` is what both have memory for."""

    TYPE: ClassVar[int] = 3
    opener_layers: LayerRange = nested(LayerRange)
    joiner_layers: LayerRange = nested(LayerRange)
    dtype: str = choice(DTYPES)
    context: int = uint(limits.MAX_CONTEXT, minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Message):
    """Progress; it also stops the other side's clock. `fraction` is 0 to 1."""

    TYPE: ClassVar[int] = 4
    stage: str = text(limits.MAX_NAME_CHARS)
    fraction: float = real(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """This side's layers are loaded, with caches for `context` positions."""

    TYPE: ClassVar[int] = 5
    context: int = uint(limits.MAX_CONTEXT, minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Message):
    """An error that concerns one session, one request, or (with neither) the whole room."""

    TYPE: ClassVar[int] = 6
    code: str = text(64)
    reason: str = text(limits.MAX_TEXT_CHARS)
    param: str | None = optional(text(64))
    session: int | None = optional(uint())
    request: int | None = optional(uint())

    @classmethod
    def of(cls, error: PeerllmError, *, session: int | None = None, request: int | None = None) -> Refusal:
        reason = error.message[: limits.MAX_TEXT_CHARS]
        return cls(code=error.code, reason=reason, param=error.param, session=session, request=request)

    def error(self) -> PeerllmError:
        return error_from_code(self.code, self.reason, self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Message):
    """This side's daemon is being stopped: what it was asked ends now, not when silence has lasted long enough."""

    TYPE: ClassVar[int] = 7


# --- Rounds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpen(Message):
    """A sequence begins: both caches are empty. `route` names the peers that a block passes, by their place in the
    chain; the verdict goes straight back to the first."""

    TYPE: ClassVar[int] = 16
    session: int = uint()
    sampling: Sampling = nested(Sampling)
    route: tuple[int, ...] = uint_list(limits.MAX_PEERS, limits.MAX_PEERS, default=(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk(Message):
    """Hidden states of rows `[start, start + rows)` of the prompt, nothing to judge. Answered by PrefillTaken."""

    TYPE: ClassVar[int] = 17
    session: int = uint()
    start: int = uint(limits.MAX_CONTEXT)
    rows: int = uint(limits.MAX_CONTEXT, minimum=1)
    hidden: bytes = blob(limits.MAX_HIDDEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTaken(Message):
    """The verifying peer's cache holds `length` rows: a credit for the sender."""

    TYPE: ClassVar[int] = 18
    session: int = uint()
    length: int = uint(limits.MAX_CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBlock(Message):
    """Candidates after token `start`, and the hidden states of rows `[start, start + len(candidates)]`."""

    TYPE: ClassVar[int] = 19
    session: int = uint()
    round: int = uint()
    start: int = uint(limits.MAX_CONTEXT)
    candidates: tuple[int, ...] = uint_list(limits.MAX_CANDIDATES, limits.MAX_VOCABULARY)
    hidden: bytes = blob(limits.MAX_HIDDEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Message):
    """`accepted` candidates were right; `next_token` follows them. Times in microseconds, for the ledger."""

    TYPE: ClassVar[int] = 20
    session: int = uint()
    round: int = uint()
    accepted: int = uint(limits.MAX_CANDIDATES)
    next_token: int = uint(limits.MAX_VOCABULARY)
    layers_us: int = uint(default=0)
    verdict_us: int = uint(default=0)
    total_us: int = uint(default=0)
    """From the block's arrival at the daemon to the verdict's departure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState(Message):
    """The verifying peer's cache for this session holds `length` rows, 0 when it lost it: the rest is to be replayed.
    Sent after a reconnect or a restart of the worker."""

    TYPE: ClassVar[int] = 22
    session: int = uint()
    length: int = uint(limits.MAX_CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClose(Message):
    TYPE: ClassVar[int] = 21
    session: int = uint()


# --- The other peer's users -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOpen(Message):
    """A user of the peer that does not draft asks. Answered by RequestEvent and at last one with `finished`, or by a
    Refusal with the same `request`. After a reconnect it is sent again for what is not finished."""

    TYPE: ClassVar[int] = 32
    request: int = uint()
    body: GenerateRequest = nested(GenerateRequest)
    offset: int = uint(default=0)
    """Characters of the answer that have come already: the rest is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent(Message):
    TYPE: ClassVar[int] = 33
    request: int = uint()
    offset: int = uint(default=0)
    """Characters of the answer before `text`: what comes twice after a reconnect is seen."""
    text: str = text(limits.MAX_TEXT_CHARS, default="")
    finished: Mapping[str, Any] | None = optional(plain_map())
    """`requests.Finished` as a map, on the last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancel(Message):
    """The user went away."""

    TYPE: ClassVar[int] = 34
    request: int = uint()


def _by_type(*kinds: type[Message]) -> dict[int, type[Message]]:
    table = {kind.TYPE: kind for kind in kinds}
    if len(table) != len(kinds):
        raise AssertionError("two messages share a number")
    return table


_TYPES = _by_type(
    Offer, Answer, Plan, Loading, Ready, Refusal, Leaving,
    SessionOpen, PrefillChunk, PrefillTaken, CandidateBlock, Verdict, SessionState, SessionClose,
    RequestOpen, RequestEvent, RequestCancel,
)  # fmt: skip


def encode_message(message: Message) -> bytes:
    return cbor.encode({"t": message.TYPE, **to_map(message)})


def decode_message(data: bytes) -> Message:
    """The message in `data`.

    Raises:
        UnknownMessage: a type of a later release: answer it with a Refusal and go on.
        ProtocolError: anything else that is wrong.
    """
    value = cbor.decode(data)
    if not isinstance(value, dict) or type(value.get("t")) is not int:
        raise ProtocolError("a message without a type")
    kind = _TYPES.get(value["t"])
    if kind is None:
        raise UnknownMessage(f"message type {value['t']} is not known to this release")
    return from_map(kind, value)
