import pytest

from peerllm.decoding.verifying import Judge, Repeat, VerifyingSession
from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.messages import CandidateBlock, Verdict


def block(round: int, start: int, candidates: tuple[int, ...] = (1, 2)) -> CandidateBlock:
    return CandidateBlock(session=9, round=round, start=start, candidates=candidates, hidden=b"")


def verdict(round: int, accepted: int) -> Verdict:
    return Verdict(session=9, round=round, accepted=accepted, next_token=5)


def prefilled(rows: int) -> VerifyingSession:
    session = VerifyingSession(9, context=20)
    session.check_prefill(0, rows)
    session.prefilled(0, rows)
    return session


def test_the_length_follows_what_was_accepted() -> None:
    session = prefilled(4)
    assert session.take(block(0, 4)) == Judge(4)
    session.judged(block(0, 4), verdict(0, 1))
    assert session.length == 6
    assert session.take(block(1, 6)) == Judge(6)


def test_a_round_that_was_judged_gets_the_same_verdict_again() -> None:
    session = prefilled(4)
    session.take(block(0, 4))
    session.judged(block(0, 4), verdict(0, 1))
    assert session.take(block(0, 4)) == Repeat(verdict(0, 1))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (block(0, 5), "4 rows are here"),
        (block(0, 4, tuple(range(16))), "beyond the context"),
    ],
)
def test_a_block_that_does_not_follow_is_refused(bad: CandidateBlock, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        prefilled(4).take(bad)


def test_a_round_of_the_past_is_refused() -> None:
    session = prefilled(4)
    session.judged(block(3, 4), verdict(3, 1))
    with pytest.raises(ProtocolError, match="past"):
        session.take(block(2, 4))


def test_prefill_leaves_no_gap_and_does_not_overflow() -> None:
    session = prefilled(4)
    with pytest.raises(ProtocolError, match="4 are here"):
        session.check_prefill(5, 1)
    with pytest.raises(ProtocolError, match="context of 20"):
        session.check_prefill(4, 17)
