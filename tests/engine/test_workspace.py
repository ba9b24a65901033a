"""What a forward and a verdict really take on the module paths, by the kernel's own account, beside what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peerllm.engine import fused, runner, workspace
from peerllm.engine.attention import grouped_attention
from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.engine import Engine
from peerllm.engine.sampling import choose
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.workspace import HOST_BYTES, path_of, workspace_bytes
from peerllm.models.allowlist import read_shape
from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests.tiny_models import make_model

SLACK_BYTES = 12 * limits.MIB
"""What a process takes now and then for itself: threads' stacks, the allocator's rounding."""
MOST_PLANNED = 1.6
"""The planned bytes over the taken ones: buffers that come one after the other are counted together, and static ones
were there before."""
CASES = [(dtype, path, context) for dtype in ("float32", "bfloat16") for path in ("eager", "graph")
         for context in (1024, 32700)]  # fmt: skip
MEASURE = """
import json, re, sys
from collections.abc import Callable
from pathlib import Path
import torch
from peerllm.engine.engine import Engine
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling


def resident(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def peak(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


folder, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
free, cut = Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0, seed=3, top_k=200, top_p=0.9)
for dtype, path, context in cases:
    engine = Engine.load(folder, LayerRange(1, 2), dtype=dtype, context=context, path=path, slots=1)
    cache = engine._cache
    cache.keys.zero_(), cache.values.zero_()
    taken = []
    steps = ((0, 2, None), (context - 128, 128, "prefill"), (context - 65, 65, cut), (context - 65, 65, free))
    for start, rows, work in steps:
        engine.open(1, cut if work is None or work == "prefill" else work)
        cache._set(engine._get(1).slot, start)
        payload = bytes(torch.randn(rows * engine.part.shape.width).to(engine.part.dtype).view(torch.uint8).tolist())
        if work == "prefill":
            taken.append(peak(lambda: engine.prefill(1, start, rows=rows, payload=payload)))
        elif work is not None:
            taken.append(peak(lambda: engine.verify(1, start, [5] * (rows - 1), payload)))
        else:
            engine.verify(1, start, [5] * (rows - 1), payload)  # what libraries take at their first use
    print(json.dumps(taken), flush=True)
    del engine, cache
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("wide") / "model", layers=2, hidden=256, heads=16, kv_heads=4, vocabulary=49152,
        context=1 << 15,
    )  # fmt: skip


def test_the_plan_covers_what_the_module_paths_take_and_not_much_more(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), json.dumps(CASES)],
        capture_output=True, text=True, timeout=300, check=False,
        # Every larger block goes back to the kernel when it is freed.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for (dtype, path, context), line in zip(CASES, run.stdout.splitlines(), strict=True):
        taken = max(json.loads(line))
        planned = workspace_bytes(
            read_shape(folder), LayerRange(1, 2), dtype, positions=context + 65, path=path, is_gpu=False
        )
        buffers = planned - HOST_BYTES
        print(dtype, path, context, [each >> 20 for each in json.loads(line)], buffers >> 20)
        assert taken <= buffers + SLACK_BYTES
        assert buffers <= MOST_PLANNED * taken + SLACK_BYTES


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (4, 4)])
def test_heads_whose_scores_take_turns_attend_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, rows, 16) for count, rows in ((heads[0], 5), (heads[1], 40), (heads[1], 40))
    )
    mask = (torch.arange(40)[None] <= torch.arange(30, 35)[:, None])[None, None]
    whole, _ = grouped_attention(None, query, key, value, mask, has_stale_keys=True)
    groups = heads[0] // heads[1]
    copied = [each.repeat_interleave(groups, dim=1) for each in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *copied, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for at_once in (1, 2):
        monkeypatch.setattr(limits, "ATTENTION_SCORES_BYTES", at_once * limits.ATTENTION_SCORE_BYTES * groups * 5 * 40)
        pieces, _ = grouped_attention(None, query, key, value, mask, has_stale_keys=True)
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


def test_rows_that_choose_in_turns_choose_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(65, 3000, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(65) + 7
    for how in (Sampling(temperature=0.0), Sampling(temperature=0.9, top_k=50, top_p=0.8, seed=5)):
        in_turns = choose(logits, how, positions)
        monkeypatch.setattr(limits, "VERDICT_ROWS_AT_ONCE", 65)
        assert torch.equal(in_turns, choose(logits, how, positions))
        monkeypatch.undo()


def test_a_block_that_is_judged_in_turns_is_judged_as_its_rows_are_chosen() -> None:
    logits = torch.randn(65, 3000, generator=torch.Generator().manual_seed(1))
    state = SamplingState.make(torch.tensor([7]))
    slots = torch.zeros(1, dtype=torch.int32)
    for how in (Sampling(temperature=0.0), Sampling(temperature=0.9, top_k=50, top_p=0.8, seed=5)):
        state.put(0, how)
        choices = choose(logits, how, torch.arange(65) + 8)
        # Right in every place but one, in the second turn and in the last.
        for wrong in (20, 63):
            candidates = choices[:64].to(torch.int32)
            candidates[wrong] = (candidates[wrong] + 1) % 3000
            verdict = torch.zeros(3, dtype=torch.int32)
            Chooser(vocabulary=3000, is_cutting=True).judge(
                logits, 65, slots, state, candidates, torch.tensor([64], dtype=torch.int32), verdict
            )
            assert verdict.tolist() == [wrong, int(choices[wrong]), 0]


def test_the_path_is_known_from_the_config_alone(tmp_path: Path) -> None:
    for family, options in (
        ("llama", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3", {}),
        ("qwen3", {"heads": 8}),
    ):
        folder = make_model(tmp_path / str(len(list(tmp_path.iterdir()))), family, layers=1, hidden=128, **options)
        part = ModelSlice(read_config(folder), LayerRange(0, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "is_available", lambda device: True)
            planned = path_of(read_shape(folder), torch.device("cuda:0"))
        assert (planned == "fused") == fused.supports(part), (family, options)
    assert path_of(read_shape(folder), torch.device("cpu")) == "eager"
    assert path_of(read_shape(folder), torch.device("cpu"), "graph") == "graph"


def test_the_fused_paths_partial_sums_of_a_long_context_are_planned(tmp_path: Path) -> None:
    """As `FusedSlice` makes them: for up to 16 rows, each head and each split of the cache."""
    folder = make_model(tmp_path / "model", layers=1, hidden=256, heads=8, kv_heads=2, context=1 << 17)
    shape, layers = read_shape(folder), LayerRange(0, 1)
    few, many = (
        workspace_bytes(shape, layers, "float16", positions=each, path="fused", is_gpu=True) for each in (1024, 1 << 17)
    )
    split = 128
    assert many - few >= 4 * 16 * shape.heads * ((1 << 17) // split - 1024 // split) * shape.head_dim


def test_the_graphs_that_are_planned_are_those_that_are_captured(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", layers=2)
    captured: list[object] = []

    class Pool(runner.GraphPool):
        def capture(self, work: Callable[[], object]) -> runner.Replay:
            captured.append(work)
            return super().capture(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GraphPool", Pool)
        patch.setattr("peerllm.engine.drafting.graph.GraphPool", Pool)
        counts = []
        for layers in (LayerRange(0, 1), LayerRange(1, 2)):
            engine = Engine.load(folder, layers, context=64, path="graph", slots=2)
            counts.append(len(captured))
            captured.clear()
            del engine
        Engine.load(folder, LayerRange(0, 1), context=64, path="graph", slots=2, draft=f"model:{folder}")
    # Those that choose with cuts have no layers in them.
    assert counts[0] == 2 * workspace.GRAPHS_OF_BLOCKS
    assert counts[1] == 2 * (workspace.GRAPHS_OF_BLOCKS + workspace.GRAPHS_OF_VERDICTS) + len(runner.BUCKETS)
    assert len(captured) == counts[0] + 2 * workspace.GRAPHS_OF_DRAFT + 1
    plans = [
        workspace.workspace_bytes(
            read_shape(folder), LayerRange(0, 2), "float16", positions=100, path=path, slots=2, is_gpu=True
        )
        for path in ("fused", "graph")
    ]
    assert plans[1] - plans[0] >= 2 * 2 * 19 * workspace.LAYER_GRAPH_BYTES
