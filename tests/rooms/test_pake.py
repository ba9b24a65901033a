"""SPAKE2 and key confirmation, without sockets: every message changed, dropped, reflected or of another release."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerllm.protocol.errors import PeerllmError, ProtocolError, VersionMismatch, WrongCode
from peerllm.rooms import pake, wire
from peerllm.rooms.wire import Introduction, Versions

NUMBER = 4127
WORDS = b"copper-winter-anchor"
OPENER_KEY, JOINER_KEY = b"O" * 32, b"J" * 32


def ends(
    words: bytes = WORDS,
    guess: bytes = WORDS,
    number: int = NUMBER,
    opener: Versions = wire.VERSIONS,
    joiner: Versions = wire.VERSIONS,
) -> tuple[pake.Opener, pake.Joiner]:
    introductions = (Introduction(b"3" * 32, 2),)
    return (
        pake.Opener(NUMBER, words, OPENER_KEY, place=1, introductions=introductions, versions=opener),
        pake.Joiner(number, guess, JOINER_KEY, versions=joiner),
    )


def run(
    opener: pake.Opener, joiner: pake.Joiner, meddle: Callable[[int, bytes], bytes] = lambda step, data: data
) -> tuple[pake.Paired, pake.Paired]:
    """The whole exchange; `meddle(step, data)` changes what is on its way. Steps 0 to 4."""
    greeting = opener.take_greeting(meddle(0, joiner.greeting()))
    confirmation = joiner.take_greeting(meddle(1, greeting))
    answer = opener.take_confirmation(meddle(2, confirmation))
    done, joined = joiner.take_confirmation(meddle(3, answer))
    return opener.take_done(meddle(4, done)), joined


def test_the_right_words_exchange_the_long_term_keys() -> None:
    opened, joined = run(*ends())
    assert (opened.remote_key, joined.remote_key) == (JOINER_KEY, OPENER_KEY)
    assert opened.version == joined.version == 1
    assert joined.place == 1


def test_a_joiner_is_introduced_to_those_who_came_before() -> None:
    _, joined = run(*ends())
    assert joined.introductions == (Introduction(b"3" * 32, 2),)


def test_wrong_words_are_a_guess_that_the_opener_sees_first() -> None:
    opener, joiner = ends(guess=b"copper-winter-animal")
    confirmation = joiner.take_greeting(opener.take_greeting(joiner.greeting()))
    with pytest.raises(WrongCode) as caught:
        opener.take_confirmation(confirmation)
    with pytest.raises(WrongCode, match="Ask for the code again"):
        joiner.take_confirmation(pake.refusal_of(caught.value))


def test_the_number_is_bound_in() -> None:
    opener, joiner = ends(number=4128)
    with pytest.raises(WrongCode):
        run(opener, joiner)


def test_nothing_that_passes_contains_the_words_or_the_keys() -> None:
    passed: list[bytes] = []

    def record(step: int, data: bytes) -> bytes:
        passed.append(data)
        return data

    run(*ends(), record)
    everything = b"".join(passed)
    secrets = [WORDS, *WORDS.split(b"-"), OPENER_KEY, JOINER_KEY, hashlib.sha256(WORDS).digest()]
    assert not [secret for secret in secrets if secret in everything]


def test_no_two_runs_send_the_same() -> None:
    first, second = [], []
    run(*ends(), lambda step, data: first.append(data) or data)  # type: ignore[func-returns-value]
    run(*ends(), lambda step, data: second.append(data) or data)  # type: ignore[func-returns-value]
    assert not set(first) & set(second)


@given(st.integers(0, 4), st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_any_byte_changed_on_its_way_ends_the_exchange(step: int, place: int, flip: int) -> None:
    def change(now: int, data: bytes) -> bytes:
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :] if now == step else data

    with pytest.raises((WrongCode, ProtocolError)):
        run(*ends(), change)


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("keep", [0, 1, 20, 33, 40, 60])
def test_any_message_cut_short_is_refused(step: int, keep: int) -> None:
    with pytest.raises((WrongCode, ProtocolError)):
        run(*ends(), lambda now, data: data[: min(keep, len(data) - 1)] if now == step else data)


def test_ones_own_message_reflected_is_refused() -> None:
    _, joiner = ends()
    with pytest.raises(ProtocolError):
        joiner.take_greeting(joiner.greeting())


def test_a_confirmation_reflected_is_refused() -> None:
    opener, joiner = ends()
    confirmation = joiner.take_greeting(opener.take_greeting(joiner.greeting()))
    with pytest.raises(WrongCode, match="does not know the words"):
        joiner.take_confirmation(confirmation)


def test_a_recorded_run_cannot_be_played_again() -> None:
    passed: list[bytes] = []
    run(*ends(), lambda step, data: passed.append(data) or data)  # type: ignore[func-returns-value]
    opener, _ = ends()
    opener.take_greeting(passed[0])
    with pytest.raises(WrongCode):
        opener.take_confirmation(passed[2])
    _, joiner = ends()
    joiner.greeting()
    joiner.take_greeting(passed[1])
    with pytest.raises(WrongCode):
        joiner.take_confirmation(passed[3])


def test_done_cannot_come_before_the_confirmation() -> None:
    opener, joiner = ends()
    opener.take_greeting(joiner.greeting())
    with pytest.raises(ProtocolError):
        opener.take_done(bytes([wire.DONE]) + bytes(32))
    with pytest.raises(ProtocolError):
        joiner.take_confirmation(bytes([wire.CONFIRM]) + bytes(64))


def test_elements_that_are_no_elements_are_refused() -> None:
    zero = b"A" + b"\x01" + bytes(31)  # the identity
    small = b"A" + bytes(32)  # of small order
    for element in (zero, small, b"A" + b"\xff" * 32, b"B" + bytes(32), b"S" + bytes(32)):
        joiner = ends()[1]
        joiner.greeting()
        with pytest.raises(ProtocolError, match="not an element"):
            joiner.take_greeting(wire.pack_greeting(wire.VERSIONS, element))


@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_anything_at_all_in_place_of_a_message_is_an_error_of_ours(data: bytes) -> None:
    opener, joiner = ends()
    joiner.greeting()
    for take in (opener.take_greeting, opener.take_confirmation, opener.take_done, joiner.take_greeting):
        with pytest.raises(PeerllmError):
            take(data)


# --- Versions ---------------------------------------------------------------------------------------------------------


def test_the_highest_common_version_is_spoken() -> None:
    opened, joined = run(*ends(opener=Versions(1, 3), joiner=Versions(2, 9)))
    assert opened.version == joined.version == 3


def test_a_release_speaks_with_the_one_before() -> None:
    for opener, joiner in ((Versions(1, 2), Versions(1, 1)), (Versions(1, 1), Versions(1, 2))):
        opened, joined = run(*ends(opener=opener, joiner=joiner))
        assert opened.version == joined.version == 1


def test_unequal_releases_say_so_instead_of_wrong_words() -> None:
    opener, joiner = ends(opener=Versions(3, 4), joiner=Versions(1, 2))
    with pytest.raises(VersionMismatch, match=r"The other peer's peerllm has to be updated") as caught:
        opener.take_greeting(joiner.greeting())
    refusal = pake.refusal_of(caught.value, Versions(3, 4))
    with pytest.raises(VersionMismatch, match=r"speaks versions 1 to 2, the other peer's 3 to 4\. This peerllm has"):
        joiner.take_greeting(refusal)


def test_a_server_that_changes_the_versions_is_found_out_and_it_is_no_guess() -> None:
    def downgrade(step: int, data: bytes) -> bytes:
        if step > 1:
            return data
        _, element = wire.unpack_greeting(data)
        return wire.pack_greeting(Versions(1, 1), element)

    with pytest.raises(ProtocolError, match="signaling server"):
        run(*ends(opener=Versions(1, 2), joiner=Versions(1, 2)), downgrade)


def test_a_later_releases_longer_greeting_is_understood() -> None:
    run(*ends(), lambda step, data: data + b"more of a later release" if step < 2 else data)


def test_a_greeting_that_is_not_peerllms_is_refused() -> None:
    good = ends()[1].greeting()
    for data in (b"HTTP" + good[4:], good[:4] + b"\x02" + good[5:], good + bytes(600), b""):
        with pytest.raises(ProtocolError):
            ends()[0].take_greeting(data)
