"""The tokenizer of the loaded model, and the text of each session's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peerllm.models.tokenizer import TextStream, Tokenizer
from peerllm.protocol.requests import ChatMessage


class Tokens:
    """The tokenizer of the model in `folder`, with a text stream for each session.

    Raises:
        ModelError: as `Tokenizer.load`.
    """

    def __init__(self, folder: Path | str) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self._streams: dict[int, TextStream] = {}

    def facts(self) -> dict[str, Any]:
        """What the daemon needs to know of it."""
        return {
            "eos_token_ids": sorted(self._tokenizer.eos_token_ids),
            "bos_token_id": self._tokenizer.bos_token_id,
            "has_chat_template": self._tokenizer.has_chat_template,
        }

    def encode_prompt(self, prompt: str) -> list[int]:
        return self._tokenizer.encode_prompt(prompt)

    def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        return self._tokenizer.encode_chat(messages)

    def text(self, session: int, tokens: list[int], *, is_final: bool) -> str:
        """What these tokens add to the session's answer, whole characters only; `is_final` flushes the rest."""
        stream = self._streams.setdefault(session, self._tokenizer.stream())
        added = stream.push(tokens)
        return added + stream.finish() if is_final else added

    def forget(self, session: int) -> None:
        self._streams.pop(session, None)
