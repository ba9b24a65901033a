"""What a forward and a verdict take beside weights and caches: static buffers, and what the modules make on their way.

Bounds from the code that takes it; tests measure them.
"""

from __future__ import annotations

import torch

from peerllm.models.allowlist import ModelShape
from peerllm.protocol import limits
from peerllm.protocol.identity import INT8, LayerRange
from peerllm.protocol.tensors import DTYPE_BYTES

GRAPH_BYTES = 64 * limits.MIB
"""Of one model's kernels and fused graphs."""
LAYER_GRAPH_BYTES = 240 * 1024
"""Of one layer by modules in one graph: kernels' nodes and what the driver keeps for them. Measured: 231 KiB."""
GRAPHS_OF_BLOCKS, GRAPHS_OF_VERDICTS, GRAPHS_OF_DRAFT = 10, 9, 3
"""Of the layers, for each sequence."""
CUDA_CONTEXT_BYTES = 680 * limits.MIB
"""cuBLAS's workspaces, the kernels' code and what the allocator's blocks are larger than what is in them, once for a
process: what an H200 had less than before at the most, beyond what the rest of the plan says."""
HOST_BYTES = 128 * limits.MIB
"""The same of a process on a CPU."""
BLOCK_ROWS = limits.MAX_CANDIDATES + 1
"""Of the longest block; a draft's verdict has one."""
_ROWS = max(BLOCK_ROWS, limits.PREFILL_CHUNK_ROWS)
_CHOICE_BYTES = 36
"""Of one logit whose row is chosen (`sampling.choose`), top-p's sort and the noise's int64 words included."""
_GRAPH_CHOICE_BYTES = 28
"""The same in a graph (`choosing.Chooser.judge`), whose sort takes few rows."""
_FUSED_HEAD_DIMS = (32, 64, 128)


def path_of(shape: ModelShape, device: torch.device, path: str = "auto") -> str:
    """`eager`, `graph` or `fused`: what `running.make_static` makes of `path` there, from the config alone."""
    if path != "auto":
        return path
    if device.type != "cuda":
        return "eager"
    # Imports transformers, which takes seconds: not for a machine that has no use for it.
    from peerllm.engine import fused

    is_fused = is_fusible(mlp_bias=shape.mlp_bias, activation=shape.activation, head_dim=shape.head_dim)
    return "fused" if is_fused and fused.is_available(device) else "graph"


def is_fusible(*, mlp_bias: bool, activation: str, head_dim: int) -> bool:
    """Whether a block is the one that the fused kernels compute."""
    return not mlp_bias and activation == "silu" and head_dim in _FUSED_HEAD_DIMS


def workspace_bytes(
    shape: ModelShape,
    layers: LayerRange,
    dtype: str,
    *,
    positions: int,
    path: str,
    is_gpu: bool,
    slots: int = 1,
    weights: str = "",
    is_draft: bool = False,
) -> int:
    """Bytes beside weights and caches.

    Args:
        positions: of one sequence's cache.
        path: one that `path_of` gives.
        slots: sequences at once.
        is_draft: it chooses one row at a time, and has few graphs.
    """
    verdict_rows = 1 if is_draft else BLOCK_ROWS
    queries = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width = 5 * shape.hidden_size + 2 * queries + 3 * shape.intermediate_size
    size = _ROWS * width * DTYPE_BYTES[dtype]
    attending, choosing = attention_bytes(shape, dtype, positions=positions, path=path), 0
    if layers.last >= shape.layers:
        if path != "eager":
            size += verdict_rows * shape.vocabulary * DTYPE_BYTES[dtype]  # the static logits
        choosing = choice_bytes(shape.vocabulary, dtype, rows=verdict_rows, path=path)
    # The fused path's buffers stay. Elsewhere a layer's attention is over when a verdict begins.
    size += attending + choosing if path == "fused" else max(attending, choosing)
    if weights == INT8:
        # Wide blocks widen one weight at a time, and narrow ones split their rows into planes.
        size += max(2 * shape.intermediate_size, queries) * shape.hidden_size * DTYPE_BYTES[dtype]
        size += 3 * _ROWS * max(shape.intermediate_size, shape.hidden_size, queries)
    if not is_gpu:
        return size + HOST_BYTES
    if path == "graph":
        graphs = GRAPHS_OF_BLOCKS + (GRAPHS_OF_VERDICTS if layers.last >= shape.layers else 0)
        size += LAYER_GRAPH_BYTES * slots * len(layers) * (GRAPHS_OF_DRAFT if is_draft else graphs)
    return size + GRAPH_BYTES + CUDA_CONTEXT_BYTES


def attention_bytes(shape: ModelShape, dtype: str, *, positions: int, path: str) -> int:
    """Of one layer over a chunk of a prompt whose last row sees `positions` (`attention.grouped_attention`)."""
    if path == "fused":
        # It reads the cache where it lies; what each row and head found in a split is added up afterwards.
        from peerllm.engine.fused.tilings import NARROW, attention_splits

        return 4 * NARROW * shape.heads * attention_splits(positions, shape.head_dim)[1] * (shape.head_dim + 2)
    each, groups = DTYPE_BYTES[dtype], shape.heads // shape.kv_heads
    if path == "eager":
        # The mask for a row and for a group's, as bools and as numbers; a CPU copies half-precision keys and values.
        copied = 2 * shape.kv_heads * shape.head_dim * each if each < DTYPE_BYTES["float32"] else 0
        return positions * (_ROWS * (1 + groups * (1 + each)) + copied)
    one_head = limits.ATTENTION_SCORE_BYTES * groups * _ROWS * positions
    scores = max(one_head, min(shape.kv_heads * one_head, limits.ATTENTION_SCORES_BYTES))
    return scores + 2 * _ROWS * positions


def choice_bytes(vocabulary: int, dtype: str, *, rows: int, path: str) -> int:
    """Of choosing from `rows` rows, the head's output included."""
    if path == "fused":
        return 4 * rows * vocabulary
    logits = rows * vocabulary * DTYPE_BYTES[dtype]
    at_once = min(rows, limits.VERDICT_ROWS_AT_ONCE) * vocabulary
    if path == "eager":
        return logits + at_once * _CHOICE_BYTES
    # The head's output is copied to the static buffer, and gone when rows are chosen.
    return max(logits, at_once * _GRAPH_CHOICE_BYTES)
