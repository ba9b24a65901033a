"""What `peerllm bench e2e` finds out of this machine before anything is planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from peerllm.cli import bench_machine
from peerllm.engine import fused, machine, memory
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, NotEnoughMemory, PeerllmError

ASKED: dict[str, Any] = dict.fromkeys(bench_machine.ASKED) | {"context": 2048, "devices": "cpu"}
THIN = {"shape": "qwen2.5-7b-thin", "draft_shape": "qwen2.5-tiny", "dtype": "float32"}


def free(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: (mib * limits.MIB, mib * limits.MIB))


def test_two_halves_that_fit_alone_and_not_together_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ASKED | THIN
    free(monkeypatch, 500)
    with pytest.raises(NotEnoughMemory, match="both halves") as refused:
        bench_machine.settle(asked)
    together, first, second = (int(each) for each in re.findall(r"(\d+) MiB", refused.value.message)[:3])
    assert max(first, second) < 500 < together and first + second <= together <= first + second + 1
    free(monkeypatch, together + 1)
    assert bench_machine.settle(asked)["shape"] == "qwen2.5-7b-thin"
    free(monkeypatch, together - 1)
    with pytest.raises(NotEnoughMemory) as refused:
        bench_machine.settle(asked)
    words = refused.value.message
    assert words.startswith(f"cpu: {together} MiB are needed for both halves of qwen2.5-7b-thin in float32")
    assert words.endswith(
        f"{together - 1} MiB are free; a smaller --shape, a --context below 2048 or --weights int8 helps"
    )


def test_the_embedding_that_a_head_is_planted_from_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 6800)
    asked = ASKED | {"shape": "qwen2.5-1.5b", "draft_shape": "qwen2.5-0.5b", "dtype": "float32", "context": 512}
    with pytest.raises(NotEnoughMemory, match="both halves") as refused:
        bench_machine.settle(asked)
    _, first, second = (int(each) for each in re.findall(r"(\d+) MiB", refused.value.message)[:3])
    # Two workers' VmHWM on a CPU, without the 329 MiB of one that has imported torch and holds nothing.
    for planned, peak in ((first, 6228 - 329), (second, 4633 - 329)):
        assert 0.98 * peak < planned < 1.1 * peak


def test_a_half_that_does_not_fit_alone_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 20)
    with pytest.raises(NotEnoughMemory, match=r"^layers 0:1 of qwen2.5-7b-thin do not fit cpu: .*a smaller --shape"):
        bench_machine.settle(ASKED | THIN)
    with pytest.raises(NotEnoughMemory) as refused:
        bench_machine.settle(ASKED | THIN | {"weights": "int8"})
    assert refused.value.message.endswith("a smaller --shape or a --context below 2048 helps")


def test_one_gpu_is_shared_by_both_halves_and_two_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.machine()
    gpus = [{"device": f"cuda:{index}", "name": "GPU", "free_bytes": 1, "total_bytes": 1} for index in range(2)]
    both = {**found, "devices": [*gpus, *found["devices"]], "dtypes": ["float16"]}
    monkeypatch.setattr(machine, "machine", lambda: both)
    monkeypatch.setattr(memory, "free_memory", lambda _: 12 * 1024 * limits.MIB)
    monkeypatch.setattr(fused, "is_available", lambda _: True)
    asked = ASKED | {"devices": "cuda:0"}
    with pytest.raises(NotEnoughMemory, match=r"^cuda:0: .* both halves of qwen2.5-7b in float16"):
        bench_machine.settle(asked)
    shared = bench_machine.settle(asked | {"devices": "cuda:0,cuda:1"})
    assert (shared["shape"], shared["draft_shape"], shared["threads"]) == ("qwen2.5-7b", "qwen2.5-0.5b", None)


def test_where_the_memory_is_not_known_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    assert bench_machine.settle(ASKED | THIN)["threads"] is not None


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_on_a_cpu_the_shapes_are_tiny_and_each_daemon_gets_half_of_the_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    found = bench_machine.settle(ASKED)
    assert (found["shape"], found["draft_shape"]) == ("qwen2.5-tiny", "qwen2.5-tiny")
    assert found["threads"] == threads
    assert bench_machine.settle(ASKED | {"threads": 5})["threads"] == 5


def test_shapes_of_two_families_are_refused() -> None:
    asked = ASKED | {"shape": "smollm2-135m", "draft_shape": "qwen2.5-tiny"}
    with pytest.raises(
        BadRequest, match=r"^--shape smollm2-135m is of the family llama, --draft-shape qwen2.5-tiny of"
    ):
        bench_machine.settle(asked)


@pytest.mark.parametrize("name", ["shape", "draft_shape"])
def test_a_shape_has_a_known_name(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^--{name.replace('_', '-')} 'huge' is not one of qwen2.5-0.5b, "):
        bench_machine.settle(ASKED | {name: "huge"})


def test_it_is_asked_in_a_process_of_its_own_so_that_this_one_is_without_torch() -> None:
    code = (
        "import json, sys\n"
        "from peerllm.cli.bench_e2e import settled\n"
        "print(json.dumps(settled(json.loads(sys.argv[1]))), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(ASKED)], capture_output=True, text=True, timeout=60, check=True
    )
    words, _, has_torch = done.stdout.strip().rpartition(" ")
    assert (json.loads(words)["shape"], has_torch) == ("qwen2.5-tiny", "False")


def test_a_torch_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so is damaged')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerllmError, match=r"^torch does not start here: OSError: libtorch.so is damaged$"):
        bench_machine.settled(ASKED)
