"""A small model with the target's tokenizer, run with a cache of its own and rewound by position."""

from __future__ import annotations

import torch

from peerllm.engine.cache import KvCache
from peerllm.engine.drafting.base import Proposal, shared_prefix
from peerllm.engine.sampling import choose, shape_logits
from peerllm.engine.slice import ModelSlice
from peerllm.protocol import limits
from peerllm.protocol.errors import NonFinite
from peerllm.protocol.requests import Sampling


class ModelDrafter:
    """Drafts with a whole model.

    The cache holds rows of the tokens in `_known`. A round keeps the rows that agree with the committed tokens and
    takes in the rest: after full acceptance that is the last candidate, which was never an input, and the target's
    token after it. Sampling uses the target's noise on this model's own logits, so that the two agree as often as
    they can.

    Args:
        vocabulary: the target's; the head's columns beyond it are padding that no target token can equal.
    """

    def __init__(self, model: ModelSlice, cache: KvCache, vocabulary: int) -> None:
        self._model = model
        self._cache = cache
        self._ids = model.head_tokens
        self._vocabulary = min(vocabulary, model.columns) if self._ids is None else model.columns
        self._known: list[list[int]] = [[] for _ in range(cache.slots)]

    @property
    def byte_count(self) -> int:
        return self._model.byte_count + self._cache.byte_count

    def forget(self, slot: int) -> None:
        self._cache.rewind(slot, 0)
        self._known[slot] = []

    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        limit = min(limit, self._cache.capacity - len(tokens))
        # A token in the target's padding would be an index beyond this model's embedding.
        if limit <= 0 or max(tokens) >= self._model.shape.vocabulary:
            return Proposal([], [])
        kept = min(shared_prefix(self._known[slot], tokens), len(tokens) - 1)
        self._cache.rewind(slot, kept)
        hidden = self._take_in(slot, tokens[kept:])
        sequence = list(tokens)
        proposal = Proposal([], [])
        while True:
            logits = self._model.logits(hidden[:, -1])[:, : self._vocabulary]
            position = torch.tensor([len(sequence)], device=logits.device)
            try:
                column = int(choose(logits, sampling, position, self._ids))
            except NonFinite:
                # The text never depends on a draft; one that is broken drafts nothing.
                break
            probability = float(candidate_probability(logits, sampling)[0, column])
            if probability < min_probability:
                break
            token = column if self._ids is None else int(self._ids[column])
            proposal.candidates.append(token)
            proposal.probabilities.append(probability)
            if len(proposal.candidates) == limit:
                break
            sequence.append(token)
            hidden = self._take_in(slot, [token])
        self._known[slot] = sequence
        return proposal

    def _take_in(self, slot: int, tokens: list[int]) -> torch.Tensor:
        """Hidden states of the last chunk of `tokens`, whose rows the cache then holds."""
        hidden = None
        for start in range(0, len(tokens), limits.PREFILL_CHUNK_ROWS):
            chunk = tokens[start : start + limits.PREFILL_CHUNK_ROWS]
            view = self._cache.view([slot], len(chunk))
            hidden = self._model(torch.tensor([chunk], device=self._model.device), view)
            self._cache.advance([slot], len(chunk))
        if hidden is None:
            raise RuntimeError("a drafter takes in one token at least")
        return hidden


def candidate_probability(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`[rows, vocabulary]`: this model's probabilities after temperature, top-k and top-p; plain ones when greedy."""
    scores = logits.to(torch.float32) if sampling.is_greedy else shape_logits(logits, sampling)
    return torch.softmax(scores, dim=-1)
