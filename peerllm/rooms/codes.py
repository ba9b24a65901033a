"""Room codes such as `4127-copper-winter-anchor`: a number from the server, and three words it never sees."""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from peerllm.protocol import limits
from peerllm.protocol.errors import WrongCode
from peerllm.rooms.words import WORDS

_PREFIX_LETTERS = 4
_BY_PREFIX = {word[:_PREFIX_LETTERS]: word for word in WORDS}
_KNOWN = frozenset(WORDS)
_SEPARATORS = re.compile(r"[\s\-_.,;:+/\u2010-\u2015]+")


@dataclass(frozen=True, slots=True)
class RoomCode:
    """`str(code)` is what one user reads to the other. Its repr hides the words, so that a log cannot show them."""

    number: int
    words: tuple[str, ...]

    @classmethod
    def parse(cls, typed: str) -> RoomCode:
        """From what a user typed: capitals, spaces and other separators do not matter, nor what follows a word's first
        four letters if the word is cut short.

        Raises:
            WrongCode: in words, with the nearest known word.
        """
        number, *words = [part for part in _SEPARATORS.split(typed.strip().lower()) if part] or [""]
        if not (number.isascii() and number.isdigit() and len(number) <= limits.MAX_ROOM_DIGITS):
            raise WrongCode("A room code begins with a number, such as 4127-copper-winter-anchor.")
        if len(words) != limits.ROOM_CODE_WORDS:
            raise WrongCode(
                f"A room code has a number and {limits.ROOM_CODE_WORDS} words; this one has {len(words)} words."
            )
        return cls(int(number), tuple(_known_word(word) for word in words))

    @property
    def password(self) -> bytes:
        """What SPAKE2 takes."""
        return "-".join(self.words).encode()

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))

    def __repr__(self) -> str:
        return "RoomCode(…)"


def make_words(below: Callable[[int], int] = secrets.randbelow) -> tuple[str, ...]:
    """Three words, each drawn from all: 33 bits. `below(n)` gives a random number under n."""
    return tuple(WORDS[below(len(WORDS))] for _ in range(limits.ROOM_CODE_WORDS))


def complete_words(typed: str) -> list[str]:
    """For the shell: what `typed`, a code's beginning, may go on to be. Empty while the number is being typed.

    >>> complete_words("4127-copper-abo")
    ['4127-copper-about', '4127-copper-above']
    """
    head, dash, last = typed.lower().rpartition("-")
    if not dash or head.count("-") >= limits.ROOM_CODE_WORDS:
        return []
    ending = "" if head.count("-") == limits.ROOM_CODE_WORDS - 1 else "-"
    found = [word for word in WORDS if word.startswith(last)]
    # A single match goes on to the next word at once; several must not, or the shell would insert the dash.
    return [f"{head}-{word}{ending if len(found) == 1 else ''}" for word in found]


def _known_word(word: str) -> str:
    if word in _KNOWN:
        return word
    if len(word) >= _PREFIX_LETTERS:
        whole = _BY_PREFIX.get(word[:_PREFIX_LETTERS])
        if whole is not None and whole.startswith(word):
            return whole
    near = difflib.get_close_matches(word[:32], WORDS, n=1, cutoff=0.6)
    hint = f" Is it {near[0]!r}?" if near else ""
    raise WrongCode(f"{word[:32]!r} is not one of the words of room codes.{hint}")
