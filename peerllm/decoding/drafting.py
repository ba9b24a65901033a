"""The drafting peer's side of one answer: what the next block is, and what a verdict makes final.

n, the committed length, is prompt + final tokens. The target's caches hold n - 1 rows; row 0 of a block is token n - 1.
This peer alone knows EOS, the token limit and the context, and lets no block run past them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peerllm.decoding.draft_length import DraftLengthPolicy
from peerllm.protocol.errors import ContextTooLong, ProtocolError
from peerllm.protocol.requests import FinishReason


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """What the engine is to draft: `tokens` are the committed ones from index `first` on, the last of them being
    token `start`; up to `draft_length` candidates follow it."""

    round: int
    start: int
    first: int
    tokens: tuple[int, ...]
    draft_length: int
    min_probability: float


@dataclass(frozen=True, slots=True)
class Committed:
    """What a verdict made final. `tokens` excludes nothing: an EOS is the last of them if `has_eos`."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    has_eos: bool = False


class DraftingSession:
    """State of one answer. Create, prefill `prefill_chunks`, then `next_block` and `judge` in turn until `finish`.

    Raises:
        ContextTooLong: the prompt leaves no room for one token.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        context: int,
        max_tokens: int | None,
        eos_token_ids: frozenset[int],
        policy: DraftLengthPolicy,
        max_candidates: int,
    ) -> None:
        if not prompt:
            raise ContextTooLong("the prompt is empty, and this model has no token to begin with", param="prompt")
        if len(prompt) >= context:
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens; the context holds {context}, one of them for the answer"
            )
        self._tokens = list(prompt)
        self.prompt_length = len(prompt)
        room = context - len(prompt)
        self._limit = room if max_tokens is None else min(room, max_tokens)
        self._eos = eos_token_ids
        self.policy = policy
        self._max_candidates = max_candidates
        self._round = -1
        self._known_to_drafter = 0
        self._judged = True
        self.finish: FinishReason | None = None

    @property
    def committed_length(self) -> int:
        return len(self._tokens)

    @property
    def completion_tokens(self) -> int:
        return len(self._tokens) - self.prompt_length

    def prefill_chunks(self, rows: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(start, tokens) of rows `[0, n - 1)`, at most `rows` at once: the prompt's but the last, or all that is
        committed but the last where an engine lost its rows."""
        last = len(self._tokens) - 1
        for start in range(0, last, rows):
            yield start, tuple(self._tokens[start : min(start + rows, last)])

    def next_block(self) -> BlockOrder:
        """The block of the next round. A block that was ordered and not judged is ordered anew, the same round: its
        verdict was lost on the way."""
        if self.finish is not None:
            raise RuntimeError("the answer is finished")
        if self._judged:
            self._round += 1
            self._judged = False
        remaining = self._limit - self.completion_tokens
        length, min_probability = self.policy.choose()
        order = BlockOrder(
            round=self._round,
            start=len(self._tokens) - 1,
            first=self._known_to_drafter,
            tokens=tuple(self._tokens[self._known_to_drafter :]),
            draft_length=max(0, min(length, remaining - 1, self._max_candidates)),
            min_probability=min_probability,
        )
        return order

    def block_drafted(self) -> None:
        """The engine has taken the last order: its tokens need not be sent to it again."""
        self._known_to_drafter = len(self._tokens)

    def drafter_lost(self) -> None:
        """The engine knows of no tokens: the next order names all of them."""
        self._known_to_drafter = 0

    def judge(self, round: int, candidates: Sequence[int], accepted: int, next_token: int) -> Committed | None:
        """Makes a verdict's tokens final, cut at EOS and at the limit. None for a verdict of an earlier round.

        Raises:
            ProtocolError: the verdict does not fit the block.
        """
        if round < self._round or (round == self._round and self._judged):
            return None
        if round > self._round:
            raise ProtocolError(f"a verdict for round {round}; round {self._round} is the latest")
        if not 0 <= accepted <= len(candidates):
            raise ProtocolError(f"a verdict that accepts {accepted} of {len(candidates)} candidates")
        self._judged = True
        new = [*candidates[:accepted], next_token]
        has_eos = False
        for index, token in enumerate(new):
            if token in self._eos:
                del new[index + 1 :]
                has_eos = True
                break
        # K is at most what remains - 1, so the limit cuts nothing off; a hostile verdict cannot pass it either.
        del new[self._limit - self.completion_tokens :]
        self._tokens += new
        if has_eos:
            self.finish = "stop"
        elif self.completion_tokens >= self._limit:
            self.finish = "length"
        return Committed(tuple(new), self.finish, has_eos)
