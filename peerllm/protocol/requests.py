"""A request for text, and what comes back, as plain types: the local API makes them, the drafting daemon serves them,
and they cross the link when the other peer was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peerllm.protocol import limits
from peerllm.protocol.fields import choice, nested, nested_list, optional, plain_map, real, text, text_list, uint

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target's token is chosen. `temperature` 0 is greedy, and so is less than LEAST_TEMPERATURE; `top_k` 0 and
    `top_p` 1 cut nothing off."""

    temperature: float = real(0.0, 2.0, default=0.0)
    top_p: float = real(0.0, 1.0, default=1.0)
    top_k: int = uint(limits.MAX_VOCABULARY, default=0)
    seed: int = uint((1 << 64) - 1, default=0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < limits.LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str = choice(("system", "user", "assistant", "developer"))
    content: str = text(limits.MAX_API_BODY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a user asked. Exactly one of `messages` (goes through the chat template) and `prompt` (does not) is set."""

    messages: tuple[ChatMessage, ...] | None = optional(nested_list(ChatMessage, limits.MAX_LIST_ITEMS))
    prompt: str | None = optional(text(limits.MAX_API_BODY_BYTES))
    max_tokens: int | None = optional(uint(limits.MAX_CONTEXT, minimum=1))
    """None: as many as the context holds."""
    stop: tuple[str, ...] = text_list(limits.MAX_STOP_STRINGS, limits.MAX_STOP_CHARS, default=())
    sampling: Sampling = nested(Sampling, default_factory=Sampling)
    draft_length: int | None = optional(uint(limits.MAX_DRAFT_LENGTH))
    """Candidates a block; None lets the drafting peer decide round by round, 0 is plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int = uint(limits.MAX_CONTEXT)
    completion_tokens: int = uint(limits.MAX_CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """More of the answer. Whole characters only: UTF-8 is never cut, and no part of a stop string appears."""

    text: str = text(limits.MAX_TEXT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an answer. `ledger` is `telemetry.ledger.RoundLedger.summary()`: figures for people and benches."""

    reason: str = choice(("stop", "length"))
    usage: Usage = nested(Usage)
    ledger: Mapping[str, Any] = plain_map(default_factory=dict)


Event = TextDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What `/v1/models` and `peerllm models` show."""

    name: str
    created: int = 0
    context_length: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
