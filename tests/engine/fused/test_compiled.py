"""What Triton's compiler makes of the kernels, for a GPU that need not be there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, for its compiler"),
    pytest.mark.timeout(300),
]

SHAPES = {
    "qwen2.5-0.5b": {"LAYERS": 24, "WIDTH": 896, "INNER": 4864, "HEADS": 14, "KV_HEADS": 2, "DIM": 64},
    "qwen3-0.6b": {"LAYERS": 28, "WIDTH": 1024, "INNER": 3072, "HEADS": 16, "KV_HEADS": 8, "DIM": 128},
    "smollm2-135m": {"LAYERS": 30, "WIDTH": 576, "INNER": 1536, "HEADS": 9, "KV_HEADS": 3, "DIM": 64},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_of_a_drafts_step_is_added_up_by_more_than_one_warp(shape, tmp_path):
    """Else there is a barrier or more for each row of each product: some 800 in place of 60."""
    code = f"from tests.engine.fused import test_compiled; print(test_compiled.barriers({shape!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 20 < int(done.stdout) < 80


def barriers(shape: str) -> int:
    """Of all the program's threads, in the step of a model of that shape for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peerllm.engine.fused.step import draft_step

    constants = SHAPES[shape] | {"CAPACITY": 1089, "SPLITS": 16, "PROGRAMS": 132, "ROWS": 8}
    constants |= {"HAS_BIAS": shape == "qwen2.5-0.5b", "HAS_QK_NORM": shape == "qwen3-0.6b"}
    kinds = dict.fromkeys(("table", "token", "positions"), "*i64") | dict.fromkeys(("slots", "arrived"), "*i32")
    kinds |= dict.fromkeys(("scaled", "partial", "partial_max", "partial_sum", "attended_all", "sums"), "*fp32")
    kinds |= {"eps": "fp32", "scaling": "fp32", "layer_stride": "i32", "slot_stride": "i32"}
    names = draft_step.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp16") for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    made = triton.compile(
        ASTSource(draft_step, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8, "num_stages": 1, "launch_cooperative_grid": True},
    )
    return made.asm["ptx"].count("bar.sync")
