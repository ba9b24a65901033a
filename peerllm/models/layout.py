"""Which tensors a model has, of which shapes, and which of them a layer range needs.

All four families call them by the same names.
"""

from __future__ import annotations

from math import prod

from peerllm.models.allowlist import ModelShape
from peerllm.models.checkpoint import DTYPE_BYTES
from peerllm.protocol.identity import LayerRange

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_tensors(shape: ModelShape, layer: int) -> Shapes:
    """Names and shapes of one decoder layer's tensors."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    tensors: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, size in linear.items():
        tensors[f"self_attn.{name}_proj.weight"] = size
        if shape.attention_bias and (name != "o" or shape.family != "qwen2"):
            tensors[f"self_attn.{name}_proj.bias"] = size[:1]
    if shape.family == "qwen3":
        tensors |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    for name, size in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        tensors[f"mlp.{name}_proj.weight"] = size
        if shape.mlp_bias:
            tensors[f"mlp.{name}_proj.bias"] = size[:1]
    return {f"model.layers.{layer}.{name}": size for name, size in tensors.items()}


def edge_tensors(shape: ModelShape) -> Shapes:
    """Embedding, final norm, and the head where it is not the embedding."""
    tensors: Shapes = {EMBEDDING: (shape.vocabulary, shape.hidden_size), NORM: (shape.hidden_size,)}
    return tensors if shape.tied else tensors | {HEAD: (shape.vocabulary, shape.hidden_size)}


def all_tensors(shape: ModelShape) -> Shapes:
    tensors = edge_tensors(shape)
    for layer in range(shape.layers):
        tensors |= layer_tensors(shape, layer)
    return tensors


def range_tensors(shape: ModelShape, layers: LayerRange) -> Shapes:
    """What the peer that holds `layers` reads: tied embeddings are needed at both ends."""
    tensors: Shapes = {}
    for layer in range(layers.first, min(layers.last, shape.layers)):
        tensors |= layer_tensors(shape, layer)
    edges = edge_tensors(shape)
    if layers.first == 0:
        tensors[EMBEDDING] = edges[EMBEDDING]
    if layers.last >= shape.layers:
        head = head_tensor(shape)
        tensors |= {NORM: edges[NORM], head: edges[head]}
    return tensors


def head_tensor(shape: ModelShape) -> str:
    """The tensor that the language-model head reads."""
    return EMBEDDING if shape.tied else HEAD


def size_bytes(tensors: Shapes, dtype: str) -> int:
    return sum(map(prod, tensors.values())) * DTYPE_BYTES[dtype]
