"""Large batches and cut heads by the fused kernels, with Triton's interpreter on the CPU; see `test_kernels`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

has_triton = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not has_triton, reason="needs Triton, for its interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the compiled kernels"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("what", ["batch", "choice"])
def test_the_kernels_say_what_plain_torch_says(what, tmp_path):
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    code = f"from tests.engine.fused import test_batch_kernels as t; t.check_{what}({str(tmp_path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def check_batch(root: str) -> None:
    """20 slots, more than a tile of the narrow products has rows, at ragged positions."""
    from peerllm.engine.batch import BatchDecoder
    from peerllm.engine.slice import ModelSlice, read_config
    from peerllm.engine.weights import load_weights
    from peerllm.protocol.identity import LayerRange
    from tests import tiny_models

    torch.set_num_threads(1)
    folder = tiny_models.make_model(Path(root) / "model", "llama", layers=1, hidden=128, heads=4, kv_heads=2)
    answers = []
    for path in ("graph", "fused"):
        part = ModelSlice(read_config(folder), LayerRange(0, 1))
        load_weights(part, folder, torch.float32, "cpu", lambda stage, fraction: None)
        decoder = BatchDecoder(part, slots=20, capacity=24, stops=[3], shared=list(range(10, 15)), window=3, path=path)
        decoder.begin(
            range(20),
            [[*decoder.shared, *range(20, 20 + slot % 4)] for slot in range(20)],
            temperatures=[0.0 if slot % 2 else 0.9 for slot in range(20)],
            seeds=[1 << slot for slot in range(20)],
            lengths=[9 + slot % 3 for slot in range(20)],
        )
        while decoder.running:
            decoder.run()
        answers.append([decoder.text(slot).tolist() for slot in range(20)])
    assert answers[0] == answers[1]


def check_choice(root: str) -> None:
    """Columns of a cut head: the noise and the tokens are the target's."""
    from peerllm.engine.choosing import Chooser, SamplingState
    from peerllm.engine.fused.choosing import FusedChooser
    from peerllm.protocol.requests import Sampling

    torch.manual_seed(1)
    tokens = torch.tensor(sorted(torch.randperm(3000)[:700].tolist()))
    logits = torch.randn(6, 700) * 3
    state = SamplingState.make(torch.tensor([5, 9, 0, 77, 3, 2]))
    for slot, temperature in enumerate((0.0, 0.8, 1.3, 0.0, 0.5, 0.8)):
        state.put(slot, Sampling(temperature=temperature, seed=slot << 33))
    slots = torch.tensor([3, 1, 0, 2, 5, 4], dtype=torch.int32)
    plain = Chooser(vocabulary=700, tokens=tokens)
    ours = FusedChooser(
        max_rows=6, columns=700, vocabulary=700, device=torch.device("cpu"), is_dependent=False, tokens=tokens
    )
    expected, flags = plain.choose(logits, slots, state)
    found = ours.choose(logits, slots, state)
    assert torch.equal(found[0], expected) and torch.equal(found[1], flags)
    for slot in (1, 3):
        said = []
        for chooser in (plain, ours):
            state.positions.copy_(torch.tensor([5, 9, 0, 77, 3, 2]))
            token, step = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
            candidates, chances = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
            here = torch.tensor([slot], dtype=torch.int32)
            chooser.advance(logits[:1].contiguous(), here, state, token, step, candidates, chances)
            said.append((int(token), int(candidates[0]), float(chances[0]), int(state.positions[slot])))
        assert said[0][:2] == said[1][:2] and said[0][3] == said[1][3]
        assert said[0][0] in tokens.tolist() and abs(said[0][2] - said[1][2]) < 1e-5
