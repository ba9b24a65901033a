"""What a worker's process needs at its peak, by the kernel's own account, for its part of a checkpoint of over 2 GB."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from peerllm.engine import codec
from peerllm.models.allowlist import check_folder
from peerllm.models.checkpoint import INDEX_FILE
from peerllm.models.layout import all_tensors, layer_tensors, range_tensors, size_bytes
from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange
from tests.engine.worker_end import Worker
from tests.tiny_models import make_tokenizer

LAYERS = 24
HALF = LAYERS // 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CONTEXT = 8
"""So few that the caches, which are counted among the spare bytes, are 7 MB at most."""
SPARE_BYTES = 64 * limits.MIB
"""For all that is not weights: buffers, the tokenizer, modules that are imported late, caches."""
PROMPT = list(range(3, 3 + CONTEXT - 2))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Zeros in bfloat16, in files with holes: they take no room on the disk and are read like any others."""
    folder = tmp_path_factory.mktemp("large")
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / INDEX_FILE).write_text("{}")  # so that the folder passes for a model's while its shapes are asked for
    shape = check_folder(folder)
    tensors = all_tensors(shape)
    per_file = [layer_tensors(shape, layer) for layer in range(LAYERS)]
    edges = {name: size for name, size in tensors.items() if not name.startswith("model.layers.")}
    groups = [edges, *({k: v for each in per_file[at : at + 4] for k, v in each.items()} for at in range(0, LAYERS, 4))]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        write_zeros(folder / file, group)
        weight_map |= dict.fromkeys(group, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 2e9
    return folder


def write_zeros(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, size in tensors.items():
        start, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(file.tell() + end)


@pytest.fixture
def worker() -> Iterator[Worker]:
    process = Worker("--threads", "1")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def imported() -> int:
    """What importing takes: the peak of a process that imports all that a loaded worker has, and does nothing else."""
    code = (
        "import peerllm.engine.worker, peerllm.engine.operations, peerllm.engine.engine\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM:')).split()[1])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return int(run.stdout) * limits.KIB


def peak_bytes(process: Worker) -> int:
    return peak_of(process.process.pid)


def peak_of(pid: int) -> int:
    """The most that the process has had resident (VmHWM of proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = next(line for line in lines if line.startswith("VmHWM:")).split()
    assert words[2] == "kB"
    return int(words[1]) * limits.KIB


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layers", [LayerRange(0, HALF), LayerRange(HALF, LAYERS)], ids=str)
def test_loading_and_computing_take_a_tenth_more_than_the_share_of_the_weights_at_most(
    checkpoint: Path, worker: Worker, imported: int, layers: LayerRange, dtype: str
) -> None:
    share = size_bytes(range_tensors(check_folder(checkpoint), layers), dtype)
    loaded = worker.load(checkpoint, (layers.first, layers.last), dtype=dtype, context=CONTEXT)
    assert loaded["bytes"]["weights"] == share
    allowed = 1.1 * share + SPARE_BYTES
    assert share <= peak_bytes(worker) - imported <= allowed
    worker.call("open", session=1, sampling={})
    if layers.first == 0:
        worker.call("prefill", session=1, start=0, tokens=PROMPT)
    else:
        rows = bytes(len(PROMPT) * CONFIG["hidden_size"] * codec.DTYPES[dtype].itemsize)
        worker.call("verify", rows, session=1, start=0, candidates=PROMPT[1:])
    assert peak_bytes(worker) - imported <= allowed
