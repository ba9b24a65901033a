"""What the target is asked: prompts of a file, or its own, said after the empty user turn of its chat template.

Which prompts are held out is a function of their tokens, so that no stretch of a run trains on what another is judged
by.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, ModelError
from peerllm.protocol.requests import ChatMessage

UNSEEN_FILE = Path(__file__).parent / "unseen_prompts.txt"
"""A hundred prompts (chat, code, lists, short answers) that no run trains on."""
_MOST_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Turns:
    """How a conversation of one question is written in tokens."""

    opener: tuple[int, ...]
    """Up to where the user's words begin."""
    closer: tuple[int, ...]
    """From the token that ends them up to where the answer begins."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Prompts of a file, in tokens, in an order that only the seed decides."""

    prompts: list[list[int]]
    digest: str

    def prompt(self, index: int, seed: int) -> list[int]:
        """Number `index` of an endless sequence: shuffled anew each time around."""
        around, place = divmod(index, len(self.prompts))
        order = list(range(len(self.prompts)))
        random.Random(seed * 1_000_003 + around).shuffle(order)
        return self.prompts[order[place]]


def is_held_out(prompt: Sequence[int], every: int) -> bool:
    """Whether this prompt (all its tokens) is one of those that are never trained on."""
    return _digest(prompt) % every == 0


def _digest(prompt: Sequence[int]) -> int:
    data = numpy.asarray(prompt, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def check_trainable(source: Turns | PromptFile, every: int, excluded: Collection[tuple[int, ...]]) -> None:
    """Raises ModelError where every prompt of a file is one of those that only judge."""
    if isinstance(source, PromptFile) and all(
        is_held_out(prompt, every) or tuple(prompt) in excluded for prompt in source.prompts
    ):
        raise ModelError(
            "every prompt of the file is held out to judge the draft by: one of --held-out-every, by its hash, and "
            "those in this package; more prompts are needed"
        )


def find_turns(tokenizer: Tokenizer) -> Turns:
    """For prompts of the target's own.

    Raises:
        ModelError: the target cannot make prompts, with the reason; a file of prompts is needed.
    """
    advice = "name a file of prompts with --prompts"
    if not tokenizer.has_chat_template:
        raise ModelError(f"the target has no chat template, so it cannot make prompts by itself; {advice}")
    try:
        opener, closer = tokenizer.user_turn()
    except BadRequest as error:
        raise ModelError(f"{error.message}, so the target cannot make prompts by itself; {advice}") from error
    if not opener or not closer:
        raise ModelError(f"the chat template puts nothing around a user's words; {advice}")
    if not tokenizer.is_special(closer[0]) and closer[0] not in tokenizer.eos_token_ids:
        raise ModelError(
            f"the chat template ends a user's words with plain text, so nobody can tell where they end; {advice}"
        )
    return Turns(tuple(opener), tuple(closer))


def read_prompts(path: Path, tokenizer: Tokenizer, *, most: int) -> PromptFile:
    """A prompt on each line, or of each block between lines of `---` where there are such lines.

    They go through the chat template where the target has one. What takes more than `most` tokens is left out.

    Raises:
        ModelError: the file cannot be read, is no UTF-8, or has no usable prompt.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is no file")
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise ModelError(f"{path} has more than {_MOST_FILE_BYTES} bytes")
        data = path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error
    found = []
    for words in split_prompts(text):
        tokens = encode(tokenizer, words)
        if 0 < len(tokens) <= most:
            found.append(tokens)
    if not found:
        raise ModelError(f"{path} has no prompt of at most {most} tokens; one stands on each line")
    return PromptFile(found, hashlib.sha256(data).hexdigest())


def split_prompts(text: str) -> list[str]:
    """Prompts in a file's text, see `read_prompts`."""
    lines = text.splitlines()
    if "---" not in lines:
        return [line.strip() for line in lines if line.strip()]
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line == "---":
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [words for block in blocks if (words := "\n".join(block).strip())]


def encode(tokenizer: Tokenizer, words: str) -> list[int]:
    """One question as the target reads it."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([ChatMessage(role="user", content=words[: limits.MAX_TEXT_CHARS])])
    return tokenizer.encode_prompt(words)


def unseen_prompts(tokenizer: Tokenizer, count: int, *, most: int) -> list[list[int]]:
    """The first `count` of the hundred, taken evenly from its kinds, in tokens; too long ones are left out."""
    found = [encode(tokenizer, words) for words in split_prompts(UNSEEN_FILE.read_text(encoding="utf-8"))]
    return [tokens for tokens in found if len(tokens) <= most][:count]
