"""Weights in int8, one scale a channel: half of float16's memory, and half of its traffic.

Only the layers' products are quantised; embedding, head and norms stay as they are. A channel is a row of the weight:
its scale is its largest absolute value over 127, and it multiplies the product, not the weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from peerllm.engine.slice import ModelSlice

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LARGEST = 127.0
_LEAST_EXPONENT = -24
"""Of float16's smallest number."""


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 `[out, in]` and float32 scales `[out]` of a weight `[out, in]`."""
    wide = weight.to(torch.float32)
    scales = wide.abs().amax(dim=1) / _LARGEST
    # Not `scales > 0`: a weight that is no number makes its channel none, as without quantising, and not nought.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (wide / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


class Int8Linear(nn.Module):
    """`nn.Linear` with an int8 weight; activations keep their dtype."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        weight, scales = quantise_weight(linear.weight.data)
        return cls(weight, scales, None if linear.bias is None else linear.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The scale's power of two goes into the weights, which loses nothing: sums of plain int8 times hidden states
        # pass float16's range.
        step = torch.exp2(torch.floor(torch.log2(self.scales)).clamp_(min=_LEAST_EXPONENT)).to(x.dtype)
        out = functional.linear(x, self.weight.to(x.dtype) * step[:, None]).to(torch.float32)
        out = out * (self.scales / step.to(torch.float32))
        if self.bias is not None:
            out = out + self.bias.to(torch.float32)
        return out.to(x.dtype)


def quantise_layer(layer: nn.Module) -> None:
    """Replaces the layer's products by int8 ones, one at a time, so that little is held twice."""
    for owner in (layer.self_attn, layer.mlp):
        for name in PROJECTIONS:
            linear = getattr(owner, name, None)
            if isinstance(linear, nn.Linear):
                setattr(owner, name, Int8Linear.of(linear))


def is_quantised(part: ModelSlice) -> bool:
    return isinstance(cast(nn.Module, part.layers[0].mlp).down_proj, Int8Linear)
