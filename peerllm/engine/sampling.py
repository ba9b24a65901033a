"""What the target model says at every row of a block, and how many candidates agree with it.

Temperature, top-k and top-p shape the logits before the noise; the noise is `noise.perturb`'s, so that a row's choice
is a function of (logits, seed, position) and never of the block that it stood in.
"""

from __future__ import annotations

import torch

from peerllm.engine import noise
from peerllm.engine.cutting import top_p_threshold
from peerllm.protocol import limits
from peerllm.protocol.errors import NonFinite
from peerllm.protocol.requests import Sampling


def has_cut(sampling: Sampling) -> bool:
    """Whether tokens may be cut off: the argmax, which is all that greedy decoding looks at, never is."""
    return not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1.0)


def shape_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`logits` `[rows, vocabulary]` over temperature, with what top-k and top-p cut off at -inf; float32.

    Top-p shares out what top-k left. The best token always survives. Tokens that tie with the last survivor survive
    too, so that the result does not depend on a sort's order.
    """
    scores = logits.to(torch.float32) / sampling.temperature
    vocabulary = scores.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        smallest = torch.topk(scores, sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        ordered = torch.sort(scores, dim=-1, descending=True).values
        smallest = top_p_threshold(ordered, scores.new_full((1, 1), sampling.top_p))
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    return scores


def scores_of(
    logits: torch.Tensor, sampling: Sampling, positions: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """The scores whose argmax is the choice: the logits when greedy, shaped and perturbed ones when sampling.

    Args:
        logits: `[rows, vocabulary]`.
        positions: int64 `[rows]`, the absolute index of the token that each row draws.
        tokens: int64 `[vocabulary]`, the columns' ids, of a draft whose head is cut: the noise is the target's.
    """
    if sampling.is_greedy:
        return logits
    return noise.perturb(shape_logits(logits, sampling), sampling.seed, positions, tokens)


def choose(
    logits: torch.Tensor, sampling: Sampling, positions: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 `[rows]`: the column that each row of `logits` chooses; see `scores_of`.

    Raises:
        NonFinite: a logit is NaN or infinite; an argmax over it would be an arbitrary token.
    """
    choices = []
    at_once = limits.VERDICT_ROWS_AT_ONCE
    for some, at in zip(logits.split(at_once), positions.split(at_once), strict=True):
        if not bool(torch.isfinite(some).all()):
            raise NonFinite("the model gave logits that are not finite; its weights or its dtype do not fit")
        choices.append(scores_of(some, sampling, at, tokens).argmax(dim=-1))
    return choices[0] if len(choices) == 1 else torch.cat(choices)


def count_agreeing(candidates: list[int], choices: list[int]) -> int:
    """The length of the longest prefix of `candidates` that equals `choices`."""
    for index, (candidate, choice) in enumerate(zip(candidates, choices, strict=False)):
        if candidate != choice:
            return index
    return min(len(candidates), len(choices))


def judge(logits: torch.Tensor, candidates: list[int], start: int, sampling: Sampling) -> tuple[int, int]:
    """The verdict on a block.

    Args:
        logits: `[len(candidates) + 1, vocabulary]`; row i follows token `start + i`.
        start: the absolute index of the token of row 0.

    Returns:
        how many candidates were right, and the target's token after them.

    Raises:
        NonFinite: see `choose`.
    """
    positions = torch.arange(start + 1, start + 1 + len(logits), device=logits.device)
    choices = choose(logits, sampling, positions).tolist()
    accepted = count_agreeing(candidates, choices[:-1])
    return accepted, choices[accepted]
