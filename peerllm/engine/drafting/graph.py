"""The draft model as a graph that feeds itself: K replays and one copy to the host for a block."""

from __future__ import annotations

import math
from functools import partial

import torch

from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.drafting.base import Proposal, shared_prefix
from peerllm.engine.module_slice import ModuleSlice
from peerllm.engine.runner import GraphPool, Replay, StaticSlice, make_choosers
from peerllm.engine.sampling import has_cut
from peerllm.protocol import limits
from peerllm.protocol.requests import Sampling

_LOOK_EVERY = 4
"""Steps between looks at the probabilities, where the caller wants drafting to stop at unlikely candidates."""
_PREFILL = limits.PREFILL_CHUNK_ROWS


class GraphDrafter:
    """`ModelDrafter` without a look at the host between candidates.

    A step embeds its token, runs the layers and the head, chooses with the target's noise among what top-k and top-p
    leave of its own logits, writes token and probability, and moves the position: its choice is the next step's input.

    Args:
        vocabulary: the target's; columns of the head beyond it are not looked at.
    """

    def __init__(self, static: StaticSlice, vocabulary: int) -> None:
        self._static = static
        self._cache = static.cache
        part, device = static.part, static.part.device
        columns = part.columns
        self._embedded = part.shape.vocabulary
        self._state = SamplingState.make(static.cache.positions)
        self._choosers = make_choosers(static, max_rows=1, columns=columns, vocabulary=min(vocabulary, columns))
        self._logits = torch.zeros(1, columns, dtype=part.dtype, device=device)
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        # One buffer, so that one copy brings both: row 0 the tokens, row 1 the probabilities' bits.
        self._out = torch.zeros(2, limits.MAX_CANDIDATES + 1, dtype=torch.int32, device=device)
        self._known: list[list[int]] = [[] for _ in range(static.cache.slots)]
        self._sampling: list[Sampling | None] = [None] * static.cache.slots
        pool = GraphPool(device)
        self._steps: list[Replay] = []
        self._chunks: list[dict[int, Replay]] = []
        for slot in range(static.cache.slots if static.is_bound_to_slot else 1):
            self._select(slot)
            chunks = {rows: pool.capture(partial(static.forward, rows)) for rows in (_PREFILL, 1)}
            self._chunks.append(chunks)
            self._steps.append(pool.capture(self._draft_step))
            static.cache.positions.zero_()
        self._cut_advance: Replay | None = None
        if self._choosers.needs_own_graphs:
            self._cut_advance = pool.capture(partial(self._advance, self._choosers.cutting))
            static.cache.positions.zero_()

    @property
    def byte_count(self) -> int:
        return self._static.part.byte_count + self._cache.byte_count

    def forget(self, slot: int) -> None:
        self._cache.rewind(slot, 0)
        self._known[slot] = []

    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        limit = min(limit, self._cache.capacity - len(tokens), limits.MAX_CANDIDATES)
        if limit <= 0 or max(tokens) >= self._embedded:
            return Proposal([], [])
        if self._sampling[slot] != sampling:
            self._state.put(slot, sampling)
            self._sampling[slot] = sampling
        self._select(slot)
        place = slot if self._static.is_bound_to_slot else 0
        kept = min(shared_prefix(self._known[slot], tokens), len(tokens) - 1)
        self._cache.rewind(slot, kept)
        self._take_in(slot, tokens[kept:-1], self._chunks[place])
        self._static.tokens[:1] = tokens[-1]
        self._step.zero_()
        wanted = 0
        found = Proposal([], [])
        while wanted < limit and len(found.candidates) == wanted:
            more = limit - wanted if min_probability <= 0.0 else min(_LOOK_EVERY, limit - wanted)
            for _ in range(more):
                self._replay_step(place, sampling)
            wanted += more
            out = self._out.to("cpu")
            found = _likely(out[0, :wanted], out[1, :wanted].view(torch.float32), min_probability)
            sequence = [*tokens, *out[0, : wanted - 1].tolist()]
        # The device moved the position by itself, one row a step; the last candidate was never an input.
        self._cache.lengths[slot] = len(sequence)
        self._known[slot] = sequence
        return found

    def _take_in(self, slot: int, tokens: list[int], chunks: dict[int, Replay]) -> None:
        for start in range(0, len(tokens), _PREFILL):
            piece = tokens[start : start + _PREFILL]
            self._static.tokens[: len(piece)] = torch.tensor(piece)
            chunks[1 if len(piece) == 1 else _PREFILL].replay()
            self._cache.advance([slot], len(piece))

    def _replay_step(self, place: int, sampling: Sampling) -> None:
        if self._cut_advance is not None and has_cut(sampling):
            self._chunks[place][1].replay()
            self._cut_advance.replay()
        else:
            self._steps[place].replay()

    def _draft_step(self) -> None:
        self._static.forward(1)
        self._advance(self._choosers.usual)

    def _advance(self, chooser: Chooser) -> None:
        """From what the layers left in the static buffers to the next step's input."""
        static = self._static
        static.logits(1, self._logits)
        chooser.advance(
            self._logits,
            static.slots,
            self._state,
            static.tokens[:1],
            self._step,
            self._out[0],
            self._out[1].view(torch.float32),
        )

    def _select(self, slot: int) -> None:
        self._static.slots.fill_(slot)
        # Warm-ups of a capture run steps: they begin at the first place each time.
        self._step.zero_()
        if isinstance(self._static, ModuleSlice):
            self._static.slot = slot


def _likely(tokens: torch.Tensor, probabilities: torch.Tensor, least: float) -> Proposal:
    """Candidates before the first that is too unlikely, or whose logits were not finite."""
    found = Proposal([], [])
    for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
        if math.isnan(probability) or probability < least:
            break
        found.candidates.append(token)
        found.probabilities.append(probability)
    return found
