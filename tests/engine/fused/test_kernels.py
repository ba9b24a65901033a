"""The fused kernels against the modules, by Triton's interpreter on the CPU: no GPU, the same source.

Triton is no dependency on machines without a GPU; where it is not installed these are skipped, and `test_gpu.py` holds
the compiled kernels to the same.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys

import pytest
import torch

# Logits reach 30, whose neighbours in float16 are 0.016 apart; the compiled kernels differ by 0.10 too.
TOLERANCE = {"float32": 1e-3, "float16": 0.25}
has_triton = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not has_triton, reason="needs Triton, for its interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the compiled kernels"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    ("family", "weights", "dtype"),
    [
        ("llama", "unquantised", "float32"),
        ("qwen3", "int8", "float32"),
        ("qwen2", "int8", "float16"),
    ],
)
def test_blocks_of_any_width_after_rewinds_with_poison_past_the_position(family, weights, dtype, tmp_path):
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    arguments = ", ".join(map(repr, (family, weights, dtype, str(tmp_path))))
    code = f"from tests.engine.fused import test_kernels; test_kernels.check({arguments})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@torch.inference_mode()
def check(family: str, weights: str, dtype: str, root: str) -> None:
    from pathlib import Path

    from peerllm.engine.codec import DTYPES
    from peerllm.engine.fused import layers
    from peerllm.engine.fused.tilings import TILINGS_INT8, Tiling
    from peerllm.engine.slice import ModelSlice, read_config
    from peerllm.engine.weights import load_weights
    from peerllm.protocol.identity import LayerRange
    from tests import tiny_models

    torch.set_num_threads(1)
    folder = tiny_models.make_model(Path(root) / "model", family, layers=2, hidden=128, heads=4, kv_heads=2)
    part = ModelSlice(read_config(folder), LayerRange(0, 2))
    load_weights(part, folder, DTYPES[dtype], "cpu", lambda stage, fraction: None, weights=weights)
    part.prepare(160)
    reference = part.make_cache(slots=1, capacity=160)
    cache = part.make_cache(slots=3, capacity=160)
    # One product in parts, so that their sum is checked too.
    layers.TILINGS[128, 256, False] = Tiling(16, 64, 4, 2, parts=4)
    TILINGS_INT8[128, 256, False, 16] = Tiling(16, 64, 4, 2, parts=4)
    fused = layers.FusedSlice(part, cache, max_rows=48, max_batch=3)
    logits = torch.zeros(48, part.shape.vocabulary, dtype=part.dtype)
    rng = random.Random(1)
    tokens: list[int] = []
    fused.slots.fill_(1)
    for rows, keep in ((40, 0), (1, 40), (3, 41), (9, 40), (1, 63), (20, 44)):
        keep = min(keep, len(tokens))
        tokens = tokens[:keep] + [rng.randrange(300) for _ in range(rows)]
        cache.lengths[1] = keep
        cache.positions[1] = keep
        cache.keys[:, 1, :, keep:] = float("nan")
        cache.values[:, 1, :, keep:] = float("nan")
        fused.tokens[:rows] = torch.tensor(tokens[keep:])
        fused.forward(rows)
        fused.logits(rows, logits)
        reference.rewind(0, 0)
        expected = part.logits(part(torch.tensor([tokens]), reference.view([0], len(tokens))))[0, keep:]
        difference = float((logits[:rows] - expected).abs().max())
        assert difference < TOLERANCE[dtype], (rows, keep, difference)
    _check_rows_alone(fused, tokens)
    _check_batch(fused, part, reference, tokens, TOLERANCE[dtype])


def _check_rows_alone(fused, tokens: list[int]) -> None:
    """A row of a narrow block is what it is alone, bit for bit."""
    fused.slots.fill_(1)

    def run(at: int, block: list[int]) -> torch.Tensor:
        fused.cache.positions[1] = at
        fused.tokens[: len(block)] = torch.tensor(block)
        return fused.forward(len(block)).clone()

    together = run(30, tokens[30:35])
    alone = torch.cat([run(30 + index, [token]) for index, token in enumerate(tokens[30:35])])
    assert torch.equal(together, alone)


def _check_batch(fused, part, reference, tokens: list[int], tolerance: float) -> None:
    """Sequences of different lengths in one forward, each as if it were alone."""
    sequences = {1: tokens, 0: [5, 6, 7], 2: list(range(20, 37))}
    for slot in (0, 2):
        fused.slots[0] = slot
        fused.cache.positions[slot] = 0
        rows = len(sequences[slot])
        fused.tokens[:rows] = torch.tensor(sequences[slot])
        fused.forward(rows)
    order = [2, 1, 0]
    fused.slots.copy_(torch.tensor(order, dtype=torch.int32))
    for slot in order:
        fused.cache.positions[slot] = len(sequences[slot])
    fused.tokens[:3] = torch.tensor([100, 101, 102])
    hidden = fused.forward(1, batch=3).clone()
    for place, slot in enumerate(order):
        reference.rewind(0, 0)
        whole = [*sequences[slot], 100 + place]
        expected = part(torch.tensor([whole]), reference.view([0], len(whole)))[0, -1]
        assert float((hidden[place] - expected).abs().max()) < tolerance, slot
