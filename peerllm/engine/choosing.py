"""Choosing tokens on the device without a look at the host, in plain torch: for graphs where Triton is not.

The same scores as `sampling.scores_of` gives; what a request asked is read from the device, so that one captured graph
serves every request. Top-k and top-p need a sort of the vocabulary: a chooser with them is another, for graphs of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peerllm.engine import noise
from peerllm.engine.cutting import thresholds
from peerllm.protocol import limits
from peerllm.protocol.requests import Sampling


@dataclass(slots=True)
class SamplingState:
    """Each slot's sampling, on the device. `positions` is the cache's own vector."""

    positions: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    """float32; 0 is greedy."""
    top_ks: torch.Tensor
    """int32; 0 cuts nothing off."""
    top_ps: torch.Tensor
    """float32; 1 cuts nothing off."""

    @classmethod
    def make(cls, positions: torch.Tensor) -> SamplingState:
        slots, device = len(positions), positions.device
        return cls(
            positions,
            torch.zeros(slots, 2, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.ones(slots, dtype=torch.float32, device=device),
        )

    def put(self, slot: int, sampling: Sampling) -> None:
        self.seeds[slot] = torch.tensor(noise.seed_key(sampling.seed), device=self.seeds.device)
        self.temperatures[slot] = 0.0 if sampling.is_greedy else sampling.temperature
        self.top_ks[slot] = sampling.top_k
        self.top_ps[slot] = sampling.top_p


_NOISE_ROWS = 32
"""Rows of a batch whose noise is made at once: in int64 it takes a hundred bytes for each token of the vocabulary."""


class Chooser:
    """Chooses from `[rows, columns]` logits, of whose columns `vocabulary` count.

    Args:
        tokens: int64 `[vocabulary]`, the columns' token ids in ascending order; None: column i is token i.
        is_cutting: whether top-k and top-p are applied, or taken to be off.
    """

    def __init__(self, *, vocabulary: int, tokens: torch.Tensor | None = None, is_cutting: bool = False) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._is_cutting = is_cutting

    def _noise(self, positions: torch.Tensor, key: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """float32 `[rows, vocabulary]`: log E of each column at `positions` `[rows]`."""
        if self._tokens is not None:
            return noise.log_exponential(noise.words_of(self._tokens, positions, key))
        block = torch.arange(-(-self._vocabulary // 4), device=positions.device)
        zero = torch.zeros((), dtype=torch.int64, device=positions.device)
        words = noise.philox_4x32((block[None, :], positions[:, None], zero, zero), key)
        return noise.log_exponential(words.reshape(len(positions), -1)[:, : self._vocabulary])

    def _shaped(self, raw: torch.Tensor, slots: torch.Tensor, state: SamplingState) -> torch.Tensor:
        """float32 `[rows, vocabulary]`: `raw` over temperature, what is cut off at -inf; `raw` itself where greedy.
        `slots`, int64 `[rows]`, say whose sampling each row's is."""
        temperature = state.temperatures.index_select(0, slots)
        is_sampled = temperature > 0
        shaped = raw / torch.where(is_sampled, temperature, 1.0)[:, None]
        if not self._is_cutting:
            return shaped
        top_k = torch.where(is_sampled, state.top_ks.index_select(0, slots), 0)
        top_p = torch.where(is_sampled, state.top_ps.index_select(0, slots), 1.0)
        return shaped.masked_fill_(shaped < thresholds(shaped, top_k, top_p), float("-inf"))

    def _scores(
        self, shaped: torch.Tensor, slots: torch.Tensor, state: SamplingState, *, first: int = 0
    ) -> torch.Tensor:
        """`shaped`, and noise where not greedy, of one sequence's rows from the block's row `first` on."""
        rows = torch.arange(first, first + len(shaped), device=shaped.device)
        slot = slots[:1]
        positions = state.positions.index_select(0, slot) + 1 + rows
        key = state.seeds.index_select(0, slot)[0]
        perturbed = shaped - self._noise(positions, (key[0], key[1]))
        return torch.where(state.temperatures.index_select(0, slot) > 0, perturbed, shaped)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SamplingState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For a batch, a row for each of `slots`: int32 `[rows]` the columns chosen, and how many of the row's logits
        are not finite. Row i draws the token after the position of its slot."""
        slots = slots.to(torch.int64)
        if logits.device.type == "cpu":
            return self._choose_on_cpu(logits, slots, state)
        return self._choose_in_graph(logits, slots, state)

    def _choose_in_graph(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SamplingState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` without a look at the host."""
        choices, flags = [], []
        for start in range(0, len(slots), _NOISE_ROWS):
            some = slots[start : start + _NOISE_ROWS]
            raw = logits[start : start + _NOISE_ROWS, : self._vocabulary].to(torch.float32)
            temperature = state.temperatures.index_select(0, some)[:, None]
            key = state.seeds.index_select(0, some)
            made = self._noise(state.positions.index_select(0, some) + 1, (key[:, :1], key[:, 1:]))
            shaped = self._shaped(raw, some, state)
            scores = torch.where(temperature > 0, shaped - made, shaped)
            choices.append(scores.argmax(dim=-1).to(torch.int32))
            flags.append((~torch.isfinite(raw)).sum(dim=-1).to(torch.int32))
        return torch.cat(choices), torch.cat(flags)

    def _choose_on_cpu(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SamplingState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` where a look at the temperatures is free and noise is the most of the work: none for greedy rows."""
        scores = logits[: len(slots), : self._vocabulary].to(torch.float32)
        flags = (~torch.isfinite(scores)).sum(dim=-1).to(torch.int32)
        choices = scores.argmax(dim=-1).to(torch.int32)
        sampled = torch.nonzero(state.temperatures[slots] > 0)[:, 0]
        for rows in sampled.split(_NOISE_ROWS) if len(sampled) else ():
            some = slots[rows]
            key = state.seeds[some]
            made = self._noise(state.positions[some] + 1, (key[:, :1], key[:, 1:]))
            choices[rows] = (self._shaped(scores[rows], some, state) - made).argmax(dim=-1).to(torch.int32)
        return choices, flags

    def judge(
        self,
        logits: torch.Tensor,
        rows: int,
        slots: torch.Tensor,
        state: SamplingState,
        candidates: torch.Tensor,
        count: torch.Tensor,
        verdict: torch.Tensor,
    ) -> None:
        """Writes (accepted, next token, logits that are not finite) to `verdict` (int32 `[3]`).

        Args:
            candidates: int32, `rows - 1` or more.
            count: int32 `[1]`, candidates in this block; rows beyond `count + 1` are padding.
        """
        # An index that is a tensor of no dimensions would be read on the host, which a capture forbids.
        here = slots[:1].to(torch.int64)
        chosen, found = [], []
        for start in range(0, rows, limits.VERDICT_ROWS_AT_ONCE):
            raw = logits[start : min(rows, start + limits.VERDICT_ROWS_AT_ONCE), : self._vocabulary].to(torch.float32)
            shaped = self._shaped(raw, here.expand(len(raw)), state)
            chosen.append(self._scores(shaped, here, state, first=start).argmax(dim=-1).to(torch.int32))
            found.append(~torch.isfinite(raw).all(dim=-1))
        choices = torch.cat(chosen)
        index = torch.arange(rows, device=logits.device)
        agrees = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        agrees[: rows - 1] = choices[: rows - 1] == candidates[: rows - 1]
        agrees &= index < count
        accepted = torch.cumprod(agrees.to(torch.int32), dim=0).sum()
        is_bad = torch.cat(found) & (index <= count)
        token = choices.gather(0, accepted[None])[0]
        verdict.copy_(torch.stack((accepted, token.to(torch.int64), is_bad.sum())))

    def advance(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        state: SamplingState,
        token: torch.Tensor,
        step: torch.Tensor,
        candidates: torch.Tensor,
        probabilities: torch.Tensor,
    ) -> None:
        """The draft's choice from one row becomes the next step's input; the slot's position moves on.

        Args:
            token: int64 `[1]`, the input.
            step: int32 `[1]`, the place in `candidates` (int32) and `probabilities` (float32; NaN where logits are
                not finite).
        """
        here = slots[:1].to(torch.int64)
        shaped = self._shaped(logits[:1, : self._vocabulary].to(torch.float32), here, state)
        choice = self._scores(shaped, here, state).argmax(dim=-1)
        probability = torch.softmax(shaped, dim=-1).gather(1, choice[:, None])[:, 0]
        if self._tokens is not None:
            choice = self._tokens.index_select(0, choice)
        place = step.to(torch.int64)
        candidates.index_copy_(0, place, choice.to(torch.int32))
        probabilities.index_copy_(0, place, probability)
        token.copy_(choice)
        step.add_(1)
        state.positions.index_add_(0, here, torch.ones_like(state.positions[:1]))
