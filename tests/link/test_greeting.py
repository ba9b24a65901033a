"""HELLO, CONFIRM and START between two sides that hold each other's fingerprints."""

from __future__ import annotations

import itertools

import pytest

from peerllm.link import frames
from peerllm.link.config import Urgency
from peerllm.link.frames import Frame, Kind
from peerllm.link.greeting import Greeting, PeerRefused, encode_refusal
from peerllm.protocol.errors import ModelMismatch, ProtocolError

START = frames.encode_control(Kind.START, 4)


def sides(*, key: bytes = b"k" * 32, fingerprint: bytes = b"r" * 32) -> tuple[Greeting, Greeting]:
    left = Greeting(
        is_controlling=True, epoch=4, key=b"k" * 32, fingerprints=(b"l" * 32, b"r" * 32), body=b"of the left"
    )
    right = Greeting(
        is_controlling=False, epoch=4, key=key, fingerprints=(fingerprint, b"l" * 32), body=b"of the right"
    )
    return left, right


def frame(wire: bytes | None) -> Frame:
    decoded = frames.decode(wire or b"")
    assert decoded is not None
    return decoded


def test_both_sides_are_done_in_any_order_of_arrival() -> None:
    for order in itertools.permutations(range(3)):
        left, right = sides()
        from_left = [left.first(), left.take(frame(right.first())), START]
        answers = [right.take(frame(from_left[index])) for index in order]
        assert right.is_done
        assert not left.is_done
        left.take(frame(next(answer for answer in answers if answer is not None)))
        assert left.is_done
        assert (left.remote_body, right.remote_body) == (b"of the right", b"of the left")


def test_the_controlled_side_waits_for_start() -> None:
    left, right = sides()
    right.take(frame(left.first()))
    right.take(frame(left.take(frame(right.first()))))
    assert not right.is_done
    right.take(frame(START))
    assert right.is_done


@pytest.mark.parametrize("other", [{"key": b"x" * 32}, {"fingerprint": b"x" * 32}])
def test_another_key_or_another_certificate_is_refused(other: dict[str, bytes]) -> None:
    left, right = sides(**other)
    answer = right.take(frame(left.first()))
    left.take(frame(right.first()))
    with pytest.raises(ProtocolError, match="between the two"):
        left.take(frame(answer))
    assert not left.is_done


def test_a_side_cannot_be_shown_its_own_confirmation() -> None:
    left, right = sides()
    own = left.take(frame(right.first()))
    with pytest.raises(ProtocolError, match="between the two"):
        left.take(frame(own))


def test_what_overtook_start_waits_and_no_more_than_so_much() -> None:
    _, right = sides()
    piece = Frame(Kind.DATA, Urgency.ROUND, 4, b"x", 0, 0, 1)
    right.take(piece)
    assert right.take_early() == [piece]
    with pytest.raises(ProtocolError, match="too many"):
        for _ in range(1_000):
            right.take(piece)


def test_a_refusal_carries_its_typed_reason() -> None:
    left, _ = sides()
    with pytest.raises(PeerRefused) as caught:
        left.take(frame(encode_refusal(4, ModelMismatch("the tokenizers differ"))))
    assert isinstance(caught.value.cause, ModelMismatch)
    assert caught.value.cause.message == "the tokenizers differ"


@pytest.mark.parametrize("body", [b"", b"\xa0", b"\xa1ecode\x01"])
def test_a_refusal_without_a_reason_is_a_protocol_error(body: bytes) -> None:
    left, _ = sides()
    with pytest.raises(ProtocolError):
        left.take(Frame(Kind.REFUSE, Urgency.CONTROL, 4, body))
