import pytest

from peerllm.decoding.draft_length import FixedDraftLength
from peerllm.decoding.drafting import DraftingSession
from peerllm.protocol.errors import ContextTooLong, ProtocolError

EOS = 0


def session(
    prompt_length: int = 5, *, context: int = 100, max_tokens: int | None = None, k: int = 4
) -> DraftingSession:
    return DraftingSession(
        list(range(1, prompt_length + 1)),
        context=context,
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}),
        policy=FixedDraftLength(k),
        max_candidates=64,
    )


def test_prefill_covers_all_rows_but_the_last_tokens() -> None:
    chunks = list(session(10).prefill_chunks(4))
    assert chunks == [(0, (1, 2, 3, 4)), (4, (5, 6, 7, 8)), (8, (9,))]
    assert list(session(1).prefill_chunks(4)) == []


def test_row_0_of_a_block_is_the_last_committed_token() -> None:
    drafting = session(5)
    order = drafting.next_block()
    assert (order.round, order.start, order.first, order.tokens) == (0, 4, 0, (1, 2, 3, 4, 5))
    drafting.block_drafted()
    drafting.judge(0, (11, 12, 13, 14), 2, 20)
    order = drafting.next_block()
    assert (order.round, order.start, order.first, order.tokens) == (1, 7, 5, (11, 12, 20))


def test_all_accepted_gives_one_token_more_than_were_drafted() -> None:
    drafting = session()
    drafting.next_block()
    committed = drafting.judge(0, (7, 8, 9), 3, 10)
    assert committed is not None
    assert committed.tokens == (7, 8, 9, 10)
    assert committed.finish is None


def test_eos_inside_an_accepted_block_ends_the_answer_there() -> None:
    drafting = session()
    drafting.next_block()
    committed = drafting.judge(0, (7, EOS, 9, 10), 4, 11)
    assert committed is not None
    assert committed.tokens == (7, EOS)
    assert committed.has_eos
    assert drafting.finish == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_block_runs_past_max_tokens(max_tokens: int) -> None:
    drafting = session(max_tokens=max_tokens, k=8)
    made = 0
    while drafting.finish is None:
        order = drafting.next_block()
        assert order.draft_length <= max_tokens - made - 1
        candidates = tuple(range(20, 20 + order.draft_length))
        committed = drafting.judge(order.round, candidates, len(candidates), 50)
        assert committed is not None
        made += len(committed.tokens)
    assert made == max_tokens
    assert drafting.finish == "length"


def test_the_answer_ends_when_the_context_is_full() -> None:
    drafting = session(5, context=8, k=8)
    order = drafting.next_block()
    assert order.draft_length == 2
    drafting.judge(0, (20, 21), 2, 22)
    assert drafting.finish == "length"
    assert drafting.committed_length == 8


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextTooLong, match=r"8 tokens.*holds 8"):
        session(8, context=8)
    with pytest.raises(ContextTooLong, match="empty"):
        session(0)


def test_a_verdict_that_comes_twice_changes_nothing() -> None:
    drafting = session()
    drafting.next_block()
    assert drafting.judge(0, (7,), 1, 8) is not None
    assert drafting.judge(0, (7,), 1, 8) is None
    drafting.next_block()
    assert drafting.judge(0, (7,), 1, 8) is None
    assert drafting.committed_length == 7


def test_a_verdict_that_does_not_fit_its_block_is_refused() -> None:
    drafting = session()
    drafting.next_block()
    with pytest.raises(ProtocolError, match="accepts 3 of 2"):
        drafting.judge(0, (7, 8), 3, 9)
    with pytest.raises(ProtocolError, match="round 5"):
        drafting.judge(5, (7, 8), 1, 9)


def test_a_block_whose_verdict_was_lost_is_ordered_again_as_the_same_round() -> None:
    drafting = session()
    first = drafting.next_block()
    assert drafting.next_block() == first
