"""Real models' shapes with random weights, for benches: all the work of a model without its download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peerllm.engine.slice import ModelSlice
from peerllm.protocol.errors import BadRequest
from peerllm.protocol.identity import LayerRange

_QWEN = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-tiny": (256, 512, 4, 4, 2, 2048, True),
    # As wide as 7B, so that the link carries what it carries of that one, and little work.
    "qwen2.5-7b-thin": (3584, 512, 2, 28, 4, 2048, False),
}
_LLAMA = {"smollm2-135m": (576, 1536, 30, 9, 3, 49152, True)}
NAMES = (*_QWEN, *_LLAMA)
_STD = 0.02


def named_config(name: str) -> Any:
    """transformers' configuration of a named shape. Raises BadRequest for an unknown name."""
    from transformers import LlamaConfig, Qwen2Config

    shapes = _QWEN | _LLAMA
    if name not in shapes:
        raise BadRequest(f"shape {name[:32]!r} is not one of {', '.join(NAMES)}", param="shape")
    hidden, inner, layers, heads, kv_heads, vocabulary, is_tied = shapes[name]
    kind = LlamaConfig if name in _LLAMA else Qwen2Config
    return kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )


def random_slice(
    config: Any, layers: LayerRange, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> ModelSlice:
    """A slice whose weights are normal with a small deviation; norms near one. Never zeros: they would time falsely."""
    part = ModelSlice(config, layers)
    generator = torch.Generator(device=device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=_STD, generator=generator)
                if parameter.dim() == 1 and name == "weight":
                    values += 1.0
                made[id(parameter)] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = made[id(parameter)]
    return part
