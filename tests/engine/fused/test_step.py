"""A draft's step as one kernel against the modules, by Triton's interpreter: one program, so nobody waits for it."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys

import pytest
import torch

from tests.engine.fused.test_kernels import TOLERANCE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, for its interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the compiled kernel"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_token_after_rewinds_with_poison_past_the_position(family, tmp_path):
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    code = f"from tests.engine.fused import test_step; test_step.check({family!r}, {str(tmp_path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_where_a_device_does_not_take_the_kernel_the_usual_ones_do_the_work(tmp_path):
    code = f"from tests.engine.fused import test_step; test_step.check_refused({str(tmp_path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True, text=True, timeout=280, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "a draft's step does not run as one kernel here: too many blocks in cooperative launch" in done.stderr


@torch.inference_mode()
def check_refused(root: str) -> None:
    from pathlib import Path

    from peerllm.engine.fused import layers
    from peerllm.engine.slice import ModelSlice, read_config
    from peerllm.engine.weights import load_weights
    from peerllm.protocol.identity import LayerRange
    from tests import tiny_models

    def refuse(*_):
        raise RuntimeError("too many blocks in cooperative launch")

    folder = tiny_models.make_model(Path(root) / "model", "llama", layers=1, hidden=256, heads=4, kv_heads=1)
    part = ModelSlice(read_config(folder), LayerRange(0, 1))
    load_weights(part, folder, torch.float16, "cpu", lambda stage, fraction: None)
    part.prepare(80)
    layers.supports_one_kernel = lambda *_: True
    layers.OneKernelStep.run = refuse
    fused = layers.FusedSlice(part, part.make_cache(slots=1, capacity=80), max_rows=1, programs=1)
    fused.tokens[0] = 5
    reference = part.make_cache(slots=1, capacity=80)
    expected = part(torch.tensor([[5]]), reference.view([0], 1))[0]
    assert float((fused.forward(1) - expected).abs().max()) < TOLERANCE["float16"]


@torch.inference_mode()
def check(family: str, root: str) -> None:
    from pathlib import Path

    from peerllm.engine.fused.layers import FusedSlice
    from peerllm.engine.fused.stepping import OneKernelStep
    from peerllm.engine.slice import ModelSlice, read_config
    from peerllm.engine.weights import load_weights
    from peerllm.protocol.identity import LayerRange
    from tests import tiny_models

    torch.set_num_threads(1)
    # One program serves one KV head.
    folder = tiny_models.make_model(Path(root) / "model", family, layers=2, hidden=256, heads=4, kv_heads=1)
    part = ModelSlice(read_config(folder), LayerRange(0, 2))
    load_weights(part, folder, torch.float16, "cpu", lambda stage, fraction: None)
    part.prepare(200)
    reference, cache = part.make_cache(slots=1, capacity=200), part.make_cache(slots=2, capacity=200)
    fused = FusedSlice(part, cache, max_rows=1)
    # A large GPU has 100 programs and more; so many rows would not fit the registers of one.
    fused._one_kernel = OneKernelStep(part, cache, fused._layers, 1)
    logits = torch.zeros(1, part.shape.vocabulary, dtype=part.dtype)
    rng = random.Random(1)
    fused.slots.fill_(1)
    for held in (0, 5, 63, 64, 130):
        reference.rewind(0, 0)
        if held:
            part(torch.tensor([[rng.randrange(300) for _ in range(held)]]), reference.view([0], held))
            reference.advance([0], held)
        for mine, theirs in ((cache.keys, reference.keys), (cache.values, reference.values)):
            mine[:, 1] = float("nan")
            mine[:, 1, :, :held] = theirs[:, 0, :, :held]
        # Two in a row: the second looks at what the first wrote.
        for position in (held, held + 1):
            token = rng.randrange(300)
            cache.positions[1] = position
            fused.tokens[0] = token
            fused.forward(1)
            fused.logits(1, logits)
            expected = part.logits(part(torch.tensor([[token]]), reference.view([0], 1)))[0]
            reference.advance([0], 1)
            assert float((logits - expected).abs().max()) < TOLERANCE["float16"], position
        assert not fused._one_kernel._arrived.any()
