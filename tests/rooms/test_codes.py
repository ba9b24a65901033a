"""Room codes as people type them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from peerllm.protocol.errors import WrongCode
from peerllm.rooms.codes import RoomCode, complete_words, make_words
from peerllm.rooms.words import WORDS

CODE = RoomCode(4127, ("copper", "winter", "anchor"))


def test_three_words_hold_at_least_33_bits() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 2048
    assert 3 * math.log2(len(WORDS)) >= 33


def test_words_are_easy_to_say_and_told_apart_early() -> None:
    assert all(word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 8 for word in WORDS)
    assert len({word[:4] for word in WORDS}) == len(WORDS)


def test_every_word_can_be_drawn() -> None:
    assert make_words(lambda below: below - 1) == (WORDS[-1],) * 3
    assert make_words(lambda below: 0) == (WORDS[0],) * 3
    assert len({make_words() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    "typed",
    [
        "4127-copper-winter-anchor",
        " 4127 Copper WINTER  anchor\n",
        "4127–copper—winter.anchor",
        "4127_copper,winter, anchor",
        "4127/copper/winter/anchor/",
        "4127-copp-wint-anchor",
        "4127 coppe winter ANCH",
    ],
)
def test_a_code_is_read_however_it_was_typed(typed: str) -> None:
    assert RoomCode.parse(typed) == CODE


def test_a_code_survives_being_shown() -> None:
    assert RoomCode.parse(str(CODE)) == CODE


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "begins with a number"),
        ("copper-winter-anchor", "begins with a number"),
        ("4127", "0 words"),
        ("4127-copper-winter", "2 words"),
        ("4127-copper-winter-anchor-zoo", "4 words"),
        ("4127-coper-winter-anchor", "Is it 'copper'"),
        ("4127-copper-winter-qqqqq", "'qqqqq' is not one of the words"),
        ("4127-co-winter-anchor", "'co' is not one"),
        ("9" * 13 + "-copper-winter-anchor", "begins with a number"),
        ("٤١٢٧-copper-winter-anchor", "begins with a number"),
    ],
)
def test_a_typo_is_told_before_anyone_is_asked(typed: str, words: str) -> None:
    with pytest.raises(WrongCode, match=words):
        RoomCode.parse(typed)


def test_a_codes_repr_hides_the_words() -> None:
    assert "copper" not in repr(CODE)
    assert "copper" not in repr({"code": CODE})


def test_words_are_completed_for_the_shell() -> None:
    assert complete_words("4127-copper-abo") == ["4127-copper-about", "4127-copper-above"]
    assert complete_words("4127-COPP") == ["4127-copper-"]
    assert complete_words("4127-copper-winter-anch") == ["4127-copper-winter-anchor"]
    assert complete_words("41") == []
    assert complete_words("4127-copper-winter-anchor-") == []
    assert complete_words("4127-qq") == []
    assert len(complete_words("4127-")) == len(WORDS)


def test_completing_a_word_imports_nothing_heavy() -> None:
    code = (
        "import sys, peerllm.rooms.codes; "
        "heavy = {'aiohttp', 'cryptography', 'spake2', 'cbor2', 'torch'}; "
        "sys.exit(', '.join({name.split('.')[0] for name in sys.modules} & heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
