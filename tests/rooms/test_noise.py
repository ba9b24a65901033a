"""Noise KK against a vector, and against everything that may happen to its messages."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.protocol.errors import ProtocolError
from peerllm.rooms import noise


def key(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


ONE = key("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1")
TWO = key("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893")
PROLOGUE = b"John Galt"


def ends(prologue: bytes = PROLOGUE, fixed: bool = False) -> tuple[noise.Initiator, noise.Responder]:
    one = key("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a") if fixed else None
    two = key("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b") if fixed else None
    return (
        noise.Initiator(ONE, TWO.public_key(), PROLOGUE, one),
        noise.Responder(TWO, ONE.public_key(), prologue, two),
    )


def shake() -> tuple[noise.Keys, noise.Keys]:
    initiator, responder = ends()
    responder.take_first(initiator.first_message(b""))
    second, theirs = responder.second_message(b"")
    return initiator.take_second(second)[1], theirs


def test_the_handshake_says_what_other_implementations_say() -> None:
    """Keys and payloads of cacophony's vectors; the same bytes come out of the Python package `noiseprotocol`."""
    initiator, responder = ends(fixed=True)
    first = initiator.first_message(b"Ludwig von Mises")
    assert first.hex() == (
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "0177015efc1fe7a37c629af7120a96274e6ab7afcc9261901d0e09ae32a5bb96"
    )
    assert responder.take_first(first) == b"Ludwig von Mises"
    second, theirs = responder.second_message(b"Murray Rothbard")
    assert second.hex() == (
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "b274d3429adc47ca093ba63ef90f8da89fda108db471dccfa4894aa7b00003"
    )
    payload, ours = initiator.take_second(second)
    assert payload == b"Murray Rothbard"
    assert ours.sending.seal(b"F. A. Hayek", b"").hex() == "966b05bc69ec01b8454d3160a214e6f24a3d884eb31ec2408af63f"
    assert theirs.sending.seal(b"Carl Menger", b"").hex() == "0ad887fba4f611bbb4afe44ba3556b8164332ca7d5934634d63d80"


def test_both_ends_have_one_session_key_and_every_run_another() -> None:
    runs = [shake() for _ in range(20)]
    assert all(ours.session == theirs.session for ours, theirs in runs)
    assert len({ours.session for ours, _ in runs}) == 20


def test_another_prologue_is_refused() -> None:
    initiator, responder = ends(prologue=b"Jane Galt")
    with pytest.raises(ProtocolError):
        responder.take_first(initiator.first_message(b""))


@pytest.mark.parametrize("is_initiator", [True, False])
def test_someone_elses_key_is_refused(is_initiator: bool) -> None:
    stranger = X25519PrivateKey.generate()
    initiator = noise.Initiator(stranger if is_initiator else ONE, TWO.public_key(), PROLOGUE)
    responder = noise.Responder(TWO if is_initiator else stranger, ONE.public_key(), PROLOGUE)
    with pytest.raises(ProtocolError):
        responder.take_first(initiator.first_message(b""))


def test_who_knows_only_public_keys_cannot_answer() -> None:
    initiator, _ = ends()
    initiator.first_message(b"")
    # The answer of someone who swapped in a first message of their own making, and has no static key of ours.
    stranger = X25519PrivateKey.generate()
    forger = noise.Responder(stranger, ONE.public_key(), PROLOGUE)
    other = noise.Initiator(ONE, stranger.public_key(), PROLOGUE)
    forger.take_first(other.first_message(b""))
    with pytest.raises(ProtocolError):
        initiator.take_second(forger.second_message(b"")[0])


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_any_changed_byte_is_refused(step: int, place: int) -> None:
    def flip(message: bytes) -> bytes:
        changed = bytearray(message)
        changed[place] ^= 1
        return bytes(changed)

    initiator, responder = ends()
    first = initiator.first_message(b"payload")
    with pytest.raises(ProtocolError):
        responder.take_first(flip(first) if step == 0 else first)
        initiator.take_second(flip(responder.second_message(b"payload")[0]))


def test_messages_cut_short_and_keys_of_small_order_are_refused() -> None:
    for message in (b"", bytes(31), bytes(47), bytes(32) + bytes(16), b"\x01" + bytes(47)):
        with pytest.raises(ProtocolError):
            ends()[1].take_first(message)
        initiator, _ = ends()
        initiator.first_message(b"")
        with pytest.raises(ProtocolError):
            initiator.take_second(message)


def test_a_direction_opens_only_what_comes_next() -> None:
    ours, theirs = shake()
    first, second = ours.sending.seal(b"1", b""), ours.sending.seal(b"2", b"")
    with pytest.raises(ProtocolError):
        theirs.receiving.open(second, b"")
    assert theirs.receiving.open(first, b"") == b"1"
    with pytest.raises(ProtocolError):
        theirs.receiving.open(first, b"")
    assert theirs.receiving.open(second, b"") == b"2"


def test_a_message_does_not_open_at_the_end_that_sealed_it() -> None:
    ours, _ = shake()
    with pytest.raises(ProtocolError):
        ours.receiving.open(ours.sending.seal(b"mine", b""), b"")


def test_a_worn_out_key_seals_no_more() -> None:
    ours, _ = shake()
    ours.sending.counter = (1 << 64) - 1
    with pytest.raises(ProtocolError, match="worn out"):
        ours.sending.seal(b"", b"")


def test_an_answer_before_the_first_message_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ends()[1].second_message(b"")
