"""Whole sequences through a whole model, without a cache: for training and for judging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from peerllm.engine.distill.answers import Sample
from peerllm.engine.slice import ModelSlice


class WholeRows:
    """In place of a cache: the rows are whole sequences from position 0 on, and each looks at those before it."""

    mask = None
    has_stale_keys = False

    def __init__(self, rows: int, device: torch.device) -> None:
        self.positions = torch.arange(rows, device=device)[None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def rows_of(tokens: torch.Tensor) -> Any:
    """The view for whole sequences `[batch, rows]`."""
    return WholeRows(tokens.shape[1], tokens.device)


def padded(samples: Sequence[Sample], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[samples, longest]` tokens, and the places in their flattened rows after which answer tokens come.

    Padding stands at the end, where no row that counts looks.
    """
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    places = []
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens)
        places.append(torch.arange(sample.start - 1, len(sample.tokens) - 1) + row * longest)
    return tokens.to(device), torch.cat(places).to(device)


@torch.no_grad()
def normed_rows(part: ModelSlice, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`[places, width]`: a whole model's normed hidden states at `places` of the flattened rows of `tokens`."""
    if part.norm is None:
        raise RuntimeError("a whole model ends with a norm")
    return part.norm(part(tokens, rows_of(tokens)).flatten(0, 1).index_select(0, places))
