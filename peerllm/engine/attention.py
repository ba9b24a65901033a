"""Attention over grouped heads without copying them, registered with transformers so that its layers call it.

transformers' own `sdpa` repeats the KV heads when a block has more than one row and a mask. Here the query heads that
share a KV head become more rows of it instead, for one row as for many: every query row goes through the same kernel,
whatever the block's length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from peerllm.protocol import limits

NAME = "peerllm"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    has_stale_keys: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query: `[batch, heads, rows, dim]`.
        key, value: `[batch, kv_heads, length, dim]`.
        attention_mask: bool `[batch, 1, rows, length]`, true where a row may look; None where the rows are the whole
            sequence and each looks at those before it (training).
        has_stale_keys: some of `length` were never written or are past the position; a masked sum is not enough for
            them, since NaN + -inf is NaN.

    Returns:
        `[batch, rows, heads, dim]`, and None for the weights.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None:
        # Copied here: not every kernel of torch's has a gradient for grouped heads, and a sequence is short.
        key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
        whole = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return whole.transpose(1, 2).contiguous(), None
    query = query.reshape(batch, kv_heads, groups * rows, dim)
    if has_stale_keys:
        out = _masked(query, key, value, attention_mask, dim**-0.5 if scaling is None else scaling)
    else:
        mask = attention_mask.repeat(1, 1, groups, 1)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).contiguous(), None


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`[batch, kv_heads, groups * rows, dim]`. KV heads whose scores pass ATTENTION_SCORES_BYTES take turns."""
    each = limits.ATTENTION_SCORE_BYTES * query.shape[0] * query.shape[2] * key.shape[2]
    at_once = max(1, limits.ATTENTION_SCORES_BYTES // each)
    queries, keys, values = (tensor.split(at_once, dim=1) for tensor in (query, key, value))
    pieces = [_attend(*turn, is_hidden=~mask, scaling=scaling) for turn in zip(queries, keys, values, strict=True)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_hidden: torch.Tensor, scaling: float
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).to(torch.float32).mul_(scaling)
    # In place: at contexts of tens of thousands a copy of the scores is hundreds of megabytes.
    batch, heads, queries, length = scores.shape
    rows = is_hidden.shape[2]
    scores.view(batch, heads, queries // rows, rows, length).masked_fill_(is_hidden[:, :, None], float("-inf"))
    scores = torch.softmax(scores, dim=-1)
    return torch.matmul(scores.to(value.dtype), value)


AttentionInterface.register(NAME, grouped_attention)
