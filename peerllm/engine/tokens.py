"""Where the engine meets the tokenizer: prompts in, an answer's text out, one stream for each session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peerllm.protocol.errors import Unsupported
from peerllm.protocol.requests import ChatMessage


def load_tokenizer(folder: Path | str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)


def vocabulary_of(folder: Path | str) -> dict[str, int]:
    """The map from token to id of the tokenizer in `folder`."""
    return dict(load_tokenizer(folder).get_vocab())


class Tokens:
    """The tokenizer of the model in `folder`."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._tokenizer = load_tokenizer(folder)
        self._streams: dict[int, _Stream] = {}

    def facts(self) -> dict[str, Any]:
        """What the daemon needs to know: EOS is the union of config, generation_config and tokenizer."""
        return {
            "eos_token_ids": self._eos_token_ids(),
            "bos_token_id": self._tokenizer.bos_token_id,
            "has_chat_template": bool(self._tokenizer.chat_template),
        }

    def encode_prompt(self, prompt: str) -> list[int]:
        """A prompt's tokens; an empty one is BOS, or nothing where the model has none."""
        tokens = list(self._tokenizer(prompt)["input_ids"])
        bos = self._tokenizer.bos_token_id
        if not tokens and bos is not None:
            return [bos]
        return tokens[1:] if tokens[:2] == [bos, bos] else tokens

    def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        """A conversation's tokens through the chat template, ending where the assistant begins.

        Raises:
            Unsupported: the model has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise Unsupported("this model has no chat template; use the completions route", param="messages")
        turns = [{"role": each.role, "content": each.content} for each in messages]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens that it wants.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, session: int, tokens: list[int], *, is_final: bool) -> str:
        """What these tokens add to the session's answer, whole characters only; `is_final` flushes the rest."""
        return self._streams.setdefault(session, _Stream(self._tokenizer)).push(tokens, is_final)

    def forget(self, session: int) -> None:
        self._streams.pop(session, None)

    def _eos_token_ids(self) -> list[int]:
        found = {self._tokenizer.eos_token_id}
        for name in ("config.json", "generation_config.json"):
            path = self._folder / name
            if path.exists():
                value = json.loads(path.read_text()).get("eos_token_id")
                found |= set(value) if isinstance(value, list) else {value}
        return sorted(each for each in found if isinstance(each, int))


class _Stream:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._sent = 0

    def push(self, tokens: list[int], is_final: bool) -> str:
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not is_final:
            text = text.rstrip("\ufffd")
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new
