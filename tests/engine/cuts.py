"""Samplings and logits that top-k and top-p are tried on, and which rows are too near to a cut to compare."""

from __future__ import annotations

import torch

from peerllm.engine import noise
from peerllm.engine.sampling import shape_logits
from peerllm.protocol.requests import Sampling

_NEAR_MASS = 1e-5
"""Of the mass: nearer to a cut than this, another order of summation may cut elsewhere."""
_NEAR_SCORE = 1e-4
"""Of the best two scores after noise, whose logarithms differ in the last bits from library to library."""


def samplings(vocabulary: int) -> list[Sampling]:
    """All pairs of the k and p below, temperatures in turn, and greedy ones between them."""
    found = []
    for index, k in enumerate((0, 1, 2, 5, 50, min(1000, vocabulary // 2), vocabulary)):
        for p in (1.0, 0.999, 0.9, 0.5, 0.1, 1e-6):
            temperature = (0.1, 0.7, 1.0, 1.3, 2.0)[len(found) % 5]
            found.append(Sampling(temperature=temperature, top_k=k, top_p=p, seed=len(found) << 34))
        found.append(Sampling(top_k=index, top_p=0.3))
    return found


def logits_of(kind: str, rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """`[rows, vocabulary]`: normal (float32), with many ties (float16), with peaks as a model's are (float16), hot
    (float32, as at a high temperature), flat: all equal."""
    made = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return ((made * 8).round() / 4).to(torch.float16)
    if kind == "peaks":
        return torch.where(made > 2.5, made * 5, made - 2).to(torch.float16)
    if kind == "flat":
        return torch.zeros_like(made)
    return made * (0.3 if kind == "hot" else 3)


def is_near(logits: torch.Tensor, sampling: Sampling, position: int, ids: torch.Tensor | None = None) -> bool:
    """Whether a row `[vocabulary]` is so near to a cut, or to another choice, that the last bits decide."""
    if sampling.is_greedy:
        return False
    scores = (logits.float() / sampling.temperature).double()
    if 0 < sampling.top_k < len(scores):
        scores = scores[scores >= scores.topk(sampling.top_k).values[-1]]
    masses = (scores - scores.max()).exp()
    levels, which = scores.unique(return_inverse=True)
    above = torch.zeros_like(levels).index_add_(0, which, masses).flip(0).cumsum(0) / masses.sum()
    if sampling.top_p < 1.0 and float((above - sampling.top_p).abs().min()) < _NEAR_MASS:
        return True
    shaped = shape_logits(logits[None], sampling)
    best = noise.perturb(shaped, sampling.seed, torch.tensor([position]), ids)[0].topk(2).values
    return bool(best[0] - best[1] < _NEAR_SCORE)
