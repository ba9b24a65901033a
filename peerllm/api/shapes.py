"""The objects that OpenAI's clients read. `seed` and `ledger` are extensions: other clients ignore them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peerllm.protocol.requests import Finished, ModelInfo, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What stays the same in all of one answer's objects."""

    is_chat: bool
    model: str
    seed: int
    includes_usage: bool = False
    """Then every chunk has `usage`, null in all but the last."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finished: Finished) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finished.reason}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._object(kind, [choice]) | {"usage": usage(finished.usage), "ledger": dict(finished.ledger)}

    def opening(self) -> dict[str, Any] | None:
        """The chunk that comes before any text: chats say whose turn it is."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.is_chat else None

    def delta(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text} if self.is_chat else text, None)

    def end(self, finished: Finished) -> dict[str, Any]:
        chunk = self._chunk({} if self.is_chat else "", finished.reason)
        return chunk | {"ledger": dict(finished.ledger)}

    def usage_chunk(self, finished: Finished) -> dict[str, Any]:
        """What `stream_options.include_usage` asks for: a last chunk without choices."""
        return self._object(self._chunk_kind, []) | {"usage": usage(finished.usage)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, content: dict[str, Any] | str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.is_chat else "text": content, "logprobs": None, "finish_reason": reason}
        chunk = self._object(self._chunk_kind, [choice])
        return chunk | {"usage": None} if self.includes_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "seed": self.seed,
            "choices": choices,
        }


def usage(counts: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def model(info: ModelInfo) -> dict[str, Any]:
    return dict(info.details) | {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "peerllm",
        "context_length": info.context_length,
    }


def sse(value: Mapping[str, Any]) -> bytes:
    """One server-sent event. The JSON is pure ASCII: no character can be cut, nor taken for the end of a line (U+2028
    and U+0085 are one to some readers), however the bytes are divided."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEPALIVE = b": waiting\n\n"
