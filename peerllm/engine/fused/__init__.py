"""The fused path for the block that Llama, Qwen2, Qwen2.5, Qwen3 and Mistral share: Triton kernels, five a layer.

    int8_matmul products with int8 weights, on the integer matrix units
    tilings     how products are cut up
    matmul      products with the norm before them and the residual, bias or SwiGLU after them
    attention   rotary embedding, cache write and split-KV attention over grouped heads, in one kernel
    noise       the random bits of each token, and what they add to its score
    choice      noise, argmax, the verdict, the draft's next step
    contenders  which tokens may survive top-k and top-p
    cut         the choice among what they leave
    step        a draft's whole step but head and choice as one kernel, on a large GPU
    rows        embedding, norm and SwiGLU for blocks that are too wide for `matmul`
    layers      a slice's layers by these kernels, on static buffers

transformers' modules stay the reference in tests. Where `is_available` says no, graphs of the modules do the work.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from peerllm.engine.slice import ModelSlice
from peerllm.engine.workspace import is_fusible

_LOWEST_CAPABILITY = (8, 0)
_DEPENDENT_CAPABILITY = (9, 0)
_HOPPER_SHARED_BYTES, _LEAST_SHARED_BYTES = 227 << 10, 99 << 10
"""Of sm_90, and the least of sm_80 and later."""


def is_available(device: torch.device | str) -> bool:
    """Whether the fused kernels run on `device`: Triton is installed and the GPU is of sm_80 or later."""
    device = torch.device(device)
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LOWEST_CAPABILITY


def has_dependent_launch(device: torch.device | str) -> bool:
    """Whether a kernel may come up while the one before it finishes (sm_90 and later)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY


def shared_memory(device: torch.device | str) -> int:
    """Bytes of shared memory that one program may have."""
    device = torch.device(device)
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    known = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return int(known) or (_HOPPER_SHARED_BYTES if has_dependent_launch(device) else _LEAST_SHARED_BYTES)


def multiprocessors(device: torch.device | str) -> int:
    """How many programs run at once where each needs a multiprocessor for itself; 0 where nothing is gained by it."""
    device = torch.device(device)
    if not has_dependent_launch(device):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def supports(part: ModelSlice) -> bool:
    """Whether the slice's block is the one that the kernels compute."""
    mlp: Any = part.layers[0].mlp
    has_bias = mlp.gate_proj.bias is not None or mlp.down_proj.bias is not None
    return is_fusible(mlp_bias=has_bias, activation=part.config.hidden_act, head_dim=part.shape.head_dim)
