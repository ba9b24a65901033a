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
    mask = attention_mask.repeat(1, 1, groups, 1)
    if has_stale_keys:
        out = _masked(query, key, value, mask, dim**-0.5 if scaling is None else scaling)
    else:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).contiguous(), None


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).to(torch.float32) * scaling
    weights = torch.softmax(torch.where(mask, scores, float("-inf")), dim=-1)
    return torch.matmul(weights.to(value.dtype), value)


AttentionInterface.register(NAME, grouped_attention)
