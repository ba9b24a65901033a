"""Drafting on while others work: for a draft that has a device of its own.

While the slice computes a block, and the network carries it, the draft goes on as if all of the block were right. Where
it was, and the token after it too, the next block's candidates are there already; where not, nothing is lost but the
work of a device that had none. What is proposed is what would have been: the draft's choice is a function of the
tokens before it alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from peerllm.engine.drafting.base import Drafter, Proposal
from peerllm.protocol.requests import Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ready:
    tokens: list[int]
    """All that the candidates follow."""
    found: Proposal
    sampling: Sampling


class AheadDrafter:
    """`inner`, in a thread of its own: torch leaves Python while it computes, so the slice goes on beside it.

    Args:
        device: the draft's. Work for a GPU has a stream of its own there.
        is_beside: a part of the slice is on that device. `go_on` comes when its block is done then, and not before: a
            draft's steps fill a GPU, the peer waits for the block, and its way through the network is time enough.
    """

    def __init__(self, inner: Drafter, device: torch.device | str = "cpu", *, is_beside: bool = False) -> None:
        self._inner = inner
        device = torch.device(device)
        self.is_beside = is_beside
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # Weights and caches were made on the common one.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")
        self._ahead: dict[int, Future[_Ready]] = {}
        self.hits = 0
        """Blocks whose candidates were there already."""

    @property
    def byte_count(self) -> int:
        return self._inner.byte_count

    def forget(self, slot: int) -> None:
        self._take(slot)
        self._thread.submit(self._alone, self._inner.forget, slot).result()

    def propose(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> Proposal:
        ready = self._take(slot)
        if ready is not None and ready.sampling == sampling:
            known = [*ready.tokens, *ready.found.candidates]
            new = len(tokens) - len(ready.tokens)
            if 0 < new < len(known) - len(ready.tokens) and known[: len(tokens)] == tokens:
                self.hits += 1
                return _likely(ready.found, new, limit, min_probability)
        propose = self._inner.propose
        return self._thread.submit(self._alone, propose, slot, tokens, limit, min_probability, sampling).result()

    def go_on(self, slot: int, tokens: list[int], limit: int, min_probability: float, sampling: Sampling) -> None:
        """Begins to draft after `tokens`, candidates included: the token that the target adds, and `limit` more."""
        if limit <= 0:
            return

        def work() -> _Ready:
            found = self._alone(self._inner.propose, slot, tokens, limit + 1, min_probability, sampling)
            return _Ready(tokens, found, sampling)

        self._ahead[slot] = self._thread.submit(work)

    def _alone(self, work: Callable[..., T], *arguments: Any) -> T:
        """In the draft's thread, on its stream."""
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        # Both are a thread's own settings.
        with torch.inference_mode(), stream:
            return work(*arguments)

    def _take(self, slot: int) -> _Ready | None:
        """What was drafted ahead, once it is there. A draft that failed says so when it is asked."""
        future = self._ahead.pop(slot, None)
        return None if future is None or future.exception() is not None else future.result()


def _likely(found: Proposal, first: int, limit: int, least: float) -> Proposal:
    """At most `limit` candidates from `first` on, before one that is too unlikely."""
    chosen = Proposal([], [])
    for token, probability in list(zip(found.candidates, found.probabilities, strict=True))[first : first + limit]:
        if probability < least:
            break
        chosen.candidates.append(token)
        chosen.probabilities.append(probability)
    return chosen
