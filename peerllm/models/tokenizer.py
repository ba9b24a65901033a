"""A model's tokenizer: prompts and conversations to tokens, and a stream of tokens to whole characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peerllm.models.checkpoint import read_json
from peerllm.protocol.errors import BadRequest, ModelError, ModelUnsupported
from peerllm.protocol.requests import ChatMessage

_SETTLE_TOKENS = 32
"""A stream that could not settle for so many tokens (bytes that are no UTF-8) looks for a place to cut its window."""
_LONGEST_CHARACTER = 4
"""Bytes in UTF-8, and so the most tokens that one character is made of."""
_REPLACEMENT = "\ufffd"
_WORDS = "peerllm"
"""Stands for a user's words in a chat template."""


class Tokenizer:
    """The tokenizer of one local folder, with the tokens that end an answer."""

    def __init__(self, backend: Any, eos_token_ids: frozenset[int], bos_token_id: int | None) -> None:
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        """Each of them ends an answer: the union of config, generation_config and tokenizer."""
        self.bos_token_id = bos_token_id
        added = backend.added_tokens_decoder
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes = _byte_fallback_ids(backend)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads the folder's tokenizer, config.json and generation_config.json. Never runs code of the model's.

        Raises:
            ModelError: the folder has no tokenizer, or it cannot be read.
            ModelUnsupported: the tokenizer is of a kind that cannot be streamed.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"{folder} is no folder")
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        configs = [config, read_json(generation) if generation.exists() else {}]
        try:
            backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise a dozen kinds, plain Exception among them
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {str(error)[:500]}") from error
        if not getattr(backend, "is_fast", False):
            raise ModelUnsupported(f"{folder}: the tokenizer has no tokenizer.json, which is needed here")
        eos = {token for each in configs for token in _token_ids(each.get("eos_token_id"))}
        eos |= set(_token_ids(backend.eos_token_id))
        starts = (backend.bos_token_id, *(each.get("bos_token_id") for each in reversed(configs)))
        bos = next((token for start in starts for token in _token_ids(start)), None)
        return cls(backend, frozenset(eos), bos)

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows; the model's embedding may be padded beyond."""
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """A bare prompt, with the beginning-of-sequence token where the tokenizer puts one; an empty one is that token.

        Raises:
            BadRequest: the prompt is empty and the model has no such token.
        """
        tokens = self._encode(text, add_special_tokens=True)
        if not tokens:
            if self.bos_token_id is None:
                raise BadRequest("the prompt is empty, and this model has no token to begin with", param="prompt")
            return [self.bos_token_id]
        # A prompt that spells the token out gets it from the tokenizer a second time.
        doubled = len(tokens) > 1 and tokens[0] == tokens[1] == self.bos_token_id
        return tokens[1:] if doubled and self._adds_bos() else tokens

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation through the model's chat template, up to where the assistant's answer begins.

        Raises:
            BadRequest: no messages, no chat template, or the template refuses them (its own words are passed on).
        """
        if not messages:
            raise BadRequest("there are no messages", param="messages")
        known = "developer" in json.dumps(self._backend.chat_template)
        conversation = [
            # OpenAI's newer name for the system's role; few templates know it.
            {"role": "system" if each.role == "developer" and not known else each.role, "content": each.content}
            for each in messages
        ]
        text = self._chat_text(conversation)
        # The template writes the beginning-of-sequence token itself.
        tokens = self._encode(text, add_special_tokens=False)
        if not tokens:
            raise BadRequest("the model's chat template makes nothing of these messages", param="messages")
        return tokens

    def user_turn(self) -> tuple[list[int], list[int]]:
        """What the chat template puts before a user's words, and after them up to where the answer begins.

        Raises:
            BadRequest: no chat template, or one that does not say a user's words once and as they are.
        """
        text = self._chat_text([{"role": "user", "content": _WORDS}])
        before, found, after = text.partition(_WORDS)
        if not found or _WORDS in after:
            raise BadRequest("the model's chat template changes a user's words", param="messages")
        return self._encode(before, add_special_tokens=False), self._encode(after, add_special_tokens=False)

    def is_special(self, token: int) -> bool:
        """Whether the token is no text."""
        return token in self._special

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, without special ones."""
        return self._backend.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stream(self) -> TextStream:
        """For the text of one answer, piece by piece."""
        return TextStream(self)

    def token_map(self) -> dict[str, int]:
        """Token to id, added ones included."""
        return dict(self._backend.get_vocab())

    def _chat_text(self, conversation: list[dict[str, str]]) -> str:
        if not self.has_chat_template:
            raise BadRequest(
                "this model has no chat template; use /v1/completions with a bare prompt", param="messages"
            )
        try:
            return self._backend.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is a program of the model's: it may raise anything
            raise BadRequest(f"the model's chat template refuses this: {str(error)[:500]}", param="messages") from error

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `verbose` would warn beyond model_max_length; the caller knows the context and refuses by it.
        return list(self._backend(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def _has_text(self, token: int) -> bool:
        """False for what `decode` leaves out: special tokens, and ids that are padding of the model's embedding."""
        return token not in self._special and self._backend.backend_tokenizer.id_to_token(token) is not None

    def _adds_bos(self) -> bool:
        return self._encode("", add_special_tokens=True)[:1] == [self.bos_token_id]


class TextStream:
    """Tokens in, whole characters out; what came out in all equals `Tokenizer.decode` of all tokens.

    Only a window of the last tokens is decoded at each push: one token that is out already, for the decoders that treat
    the first token apart (a leading space), and those whose text is not out yet.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = 0
        """Characters of the window's text that are out, the context's included."""

    def push(self, tokens: Iterable[int]) -> str:
        """What these tokens add. Characters that are not whole yet come out with a later push."""
        fresh = [token for token in tokens if self._tokenizer._has_text(token)]
        if not fresh:
            return ""
        self._pending += fresh
        # A run of byte tokens is valid or invalid as a whole: more bytes may still undo what is decoded of it.
        if self._pending[-1] in self._tokenizer._bytes:
            return ""
        text = self._window()
        if text.endswith(_REPLACEMENT):
            added = self._take(text[:-1])
            if len(self._pending) >= _SETTLE_TOKENS:
                self._cut()
            return added
        added = self._take(text)
        self._settle(self._pending)
        return added

    def finish(self) -> str:
        """The rest, also of a character that never became whole (as U+FFFD). The stream is empty afterwards."""
        added = self._take(self._window()) if self._pending else ""
        self._context, self._pending, self._given = [], [], 0
        return added

    def _window(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)

    def _take(self, text: str) -> str:
        added = text[self._given :]
        self._given = max(self._given, len(text))
        return added

    def _settle(self, tokens: list[int]) -> None:
        """`tokens` are out; the next window begins with the last of them as its context."""
        self._context, self._pending = tokens[-1:], []
        self._given = len(self._tokenizer.decode(self._context))

    def _cut(self) -> None:
        """Drops the front of a window that does not settle, where both parts give the same text as the whole."""
        window = self._context + self._pending
        front, back = window[:-_LONGEST_CHARACTER], window[-_LONGEST_CHARACTER:]
        before = self._tokenizer.decode(front)
        if before + self._tokenizer.decode(back) == self._window():
            self._context, self._pending, self._given = [], back, max(0, self._given - len(before))


def _token_ids(value: Any) -> list[int]:
    """Of a config's `eos_token_id`: one, a list, or none."""
    listed = value if isinstance(value, list) else [value]
    return [token for token in listed if type(token) is int and token >= 0]


def _byte_fallback_ids(backend: Any) -> frozenset[int]:
    """Ids of the tokens that stand for one byte each, in tokenizers that fall back to bytes."""
    if "ByteFallback" not in str(backend.backend_tokenizer.decoder):
        return frozenset()
    vocabulary = backend.backend_tokenizer
    ids = (vocabulary.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)
