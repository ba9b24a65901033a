"""Release N understands release N - 1, by messages that release 1 once sent: `recorded_release_1.txt` never changes.

Each line of it is `name hexadecimal`. It was made by `python -m tests.rooms.test_releases`, from the entropy below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.rooms import attempt as attempts
from peerllm.rooms import pake, wire
from peerllm.rooms.wire import Versions

RECORDING = Path(__file__).parent / "recorded_release_1.txt"
OLD, NEW = Versions(1, 1), Versions(1, 2)
NUMBER, WORDS = 4127, b"copper-winter-anchor"
OPENER, JOINER, ONE, TWO = (X25519PrivateKey.from_private_bytes(bytes([each]) * 32) for each in (1, 2, 3, 4))
TAG = b"attempt."


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def entropy(seed: bytes) -> Callable[[int], bytes]:
    return lambda length: hashlib.shake_256(seed).digest(length)


def opener(versions: Versions) -> pake.Opener:
    return pake.Opener(NUMBER, WORDS, public(OPENER), entropy=entropy(b"opener"), versions=versions)


def joiner(versions: Versions) -> pake.Joiner:
    return pake.Joiner(NUMBER, WORDS, public(JOINER), entropy=entropy(b"joiner"), versions=versions)


def pairing(opener: pake.Opener, joiner: pake.Joiner) -> list[bytes]:
    greeting = joiner.greeting()
    answer = opener.take_greeting(greeting)
    confirmation = joiner.take_greeting(answer)
    confirmed = opener.take_confirmation(confirmation)
    done, _ = joiner.take_confirmation(confirmed)
    opener.take_done(done)
    return [greeting, answer, confirmation, confirmed, done]


def beginning(versions: Versions) -> attempts.Beginning:
    return attempts.Beginning(OPENER, JOINER.public_key(), 7, versions, tag=TAG, ephemeral=ONE)


def answered(frame: bytes, versions: Versions) -> bytes:
    return attempts.answer(JOINER, OPENER.public_key(), frame, versions, ephemeral=TWO)[1]


def record() -> dict[str, bytes]:
    """What release 1 sends in every conversation with itself and with the release after it."""
    made: dict[str, bytes] = {}
    for name, ours, theirs in (("old-old", OLD, OLD), ("old-new", OLD, NEW), ("new-old", NEW, OLD)):
        for step, message in enumerate(pairing(opener(ours), joiner(theirs))):
            made[f"{name}-{step}"] = message
        made[f"{name}-begin"] = beginning(ours).frame
        made[f"{name}-answer"] = answered(made[f"{name}-begin"], theirs)
    return made


def recorded() -> dict[str, bytes]:
    lines = [line.split() for line in RECORDING.read_text().splitlines()]
    return {name: bytes.fromhex(text) for name, text in lines}


def test_this_release_still_says_what_release_1_said() -> None:
    assert record() == recorded()


def test_a_new_opener_pairs_with_a_recorded_old_joiner() -> None:
    old = recorded()
    new = opener(NEW)
    new.take_greeting(old["new-old-0"])
    new.take_confirmation(old["new-old-2"])
    paired = new.take_done(old["new-old-4"])
    assert (paired.version, paired.remote_key) == (1, public(JOINER))


def test_a_new_joiner_pairs_with_a_recorded_old_opener() -> None:
    old = recorded()
    new = joiner(NEW)
    new.greeting()
    new.take_greeting(old["old-new-1"])
    _, paired = new.take_confirmation(old["old-new-3"])
    assert (paired.version, paired.remote_key) == (1, public(OPENER))


@pytest.mark.parametrize("versions", [OLD, NEW])
def test_an_attempt_of_a_recorded_old_peer_is_answered(versions: Versions) -> None:
    tag, frame, epoch, _ = attempts.answer(JOINER, OPENER.public_key(), recorded()["old-old-begin"], versions)
    assert (tag, epoch) == (TAG, 7)
    assert frame[9:11] == (1).to_bytes(2)


def test_a_recorded_old_answer_completes_a_new_peers_attempt() -> None:
    answer = recorded()["new-old-answer"]
    assert answer[0] == wire.ANSWER
    keys = beginning(NEW).take_answer(answer[9:11], answer[11:])
    assert len(keys.session) == 32


if __name__ == "__main__":
    RECORDING.write_text("".join(f"{name} {message.hex()}\n" for name, message in record().items()))
