"""Top-k and top-p as a threshold of each row: tokens that score less are cut off.

Tokens that tie with the last survivor survive, so that nothing depends on a sort's order. Masses are summed as
integers, so that nothing depends on an order of summation either: a row's threshold is the same alone and in any block.
"""

from __future__ import annotations

import torch

MASS_SCALE = float(1 << 44)
"""The best token's mass as an integer: 2**18 tokens of it stay below 2**63, and what it rounds off is nothing to p."""
_SORTED_ROWS = 4
"""Rows sorted at once: some 50 bytes for each token of the vocabulary."""


def top_p_threshold(ordered: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, 1]`: the smallest score whose strictly greater ones have less than `top_p` of the mass.

    Args:
        ordered: float32 `[rows, vocabulary]`, scores in descending order; -inf has no mass.
        top_p: float32 `[rows, 1]`; 1 or more cuts nothing off, and the best token survives 0.
    """
    masses = ((ordered - ordered[:, :1]).exp() * MASS_SCALE).to(torch.int64)
    before = masses.cumsum(dim=-1) - masses
    wanted = (masses.sum(dim=-1, keepdim=True).to(torch.float64) * top_p.to(torch.float64)).ceil().to(torch.int64)
    last = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return torch.where(top_p < 1.0, ordered.gather(-1, last), float("-inf"))


def thresholds(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, 1]`: top-k's and, over what it leaves, top-p's; without a look at the host.

    Args:
        scores: float32 `[rows, vocabulary]`: logits over temperature.
        top_k: int32 `[rows]`; 0 cuts nothing off.
        top_p: float32 `[rows]`; 1 cuts nothing off.
    """
    vocabulary = scores.shape[-1]
    found = []
    for piece, k, p in zip(*(each.split(_SORTED_ROWS) for each in (scores, top_k, top_p)), strict=True):
        ordered = torch.sort(piece, dim=-1, descending=True).values
        last = torch.where(k > 0, k, vocabulary).clamp_(max=vocabulary).to(torch.int64)[:, None] - 1
        smallest = ordered.gather(-1, last)
        left = ordered.masked_fill(ordered < smallest, float("-inf"))
        found.append(torch.maximum(smallest, top_p_threshold(left, p[:, None])))
    return torch.cat(found)
