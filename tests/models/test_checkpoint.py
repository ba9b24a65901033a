from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peerllm.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, Staging, load_parameters, read_header
from peerllm.protocol import limits
from peerllm.protocol.errors import ModelError, ModelUnsupported


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "half": torch.randn(5, 7, generator=generator).half(),
        "brain": torch.randn(3, 2, 4, generator=generator).bfloat16(),
        "full": torch.randn(11, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(weights(), tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    tensors = weights()
    parts = {"model-1.safetensors": ["half", "scalar"], "model-2.safetensors": ["brain", "full", "empty"]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    return tmp_path


def write_raw(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("layout", ["folder", "indexed"])
def test_reads_every_tensor_as_it_was_saved(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint.open(request.getfixturevalue(layout))
    assert checkpoint.names() == checkpoint.all_names() == weights().keys()
    for name, expected in weights().items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert getattr(torch, checkpoint.dtype(name)) == expected.dtype
        target = torch.full_like(expected, -1)
        checkpoint.read_into(name, target)
        assert torch.equal(target, expected)


def test_converts_through_a_buffer_smaller_than_the_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WEIGHT_STAGING_BYTES", 16)
    checkpoint = Checkpoint.open(folder)
    for name in ("half", "brain", "full"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            target = torch.empty(checkpoint.shape(name), dtype=dtype)
            checkpoint.read_into(name, target)
            assert torch.equal(target, weights()[name].to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reads_onto_a_gpu_in_any_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WEIGHT_STAGING_BYTES", 16)
    checkpoint = Checkpoint.open(folder)
    for name in ("half", "brain", "full", "scalar"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            target = torch.empty(checkpoint.shape(name), dtype=dtype, device="cuda")
            checkpoint.read_into(name, target)
            assert torch.equal(target.cpu(), weights()[name].to(dtype))


def test_reads_into_a_part_of_a_larger_tensor(folder: Path) -> None:
    joined = torch.zeros(10, 7, dtype=torch.half)
    Checkpoint.open(folder).read_into("half", joined[5:])
    assert torch.equal(joined[5:], weights()["half"]) and not joined[:5].any()


def test_a_target_of_another_shape_or_with_gaps_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for target in (torch.empty(7, 5), torch.empty(7, 5).t(), torch.empty(35)):
        with pytest.raises(ValueError, match="contiguous target"):
            checkpoint.read_into("half", target)


def test_files_of_other_layers_may_be_absent(indexed: Path) -> None:
    (indexed / "model-2.safetensors").unlink()
    checkpoint = Checkpoint.open(indexed)
    assert checkpoint.names() == {"half", "scalar"}
    assert checkpoint.all_names() == weights().keys()
    with pytest.raises(ModelError, match=r"brain.*model-2\.safetensors is not there"):
        checkpoint.shape("brain")


def test_a_tensor_that_the_index_misplaces_is_an_error_that_names_the_file(indexed: Path) -> None:
    index = json.loads((indexed / INDEX_FILE).read_text())
    index["weight_map"]["half"] = "model-2.safetensors"
    (indexed / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors lacks tensor 'half'"):
        Checkpoint.open(indexed)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "model.bin", ""])
def test_an_index_names_only_safetensors_files_beside_it(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match="not a safetensors file beside it"):
        Checkpoint.open(tmp_path)


def test_a_file_cut_anywhere_is_an_error_that_names_it(folder: Path) -> None:
    path = folder / SINGLE_FILE
    whole = path.read_bytes()
    for length in (0, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors.*(truncated|corrupt)"):
            Checkpoint.open(folder)


def test_a_file_that_shrinks_after_opening_is_an_error(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"model\.safetensors has become shorter"):
        for name in weights():
            checkpoint.read_into(name, torch.empty(checkpoint.shape(name)))


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}',
        b"[" * 100_000,
        {"a": 1},
        {"a": entry(0, 8, [1])},
        {"a": entry(4, 0, [1])},
        {"a": entry(-4, 0, [1])},
        {"a": entry(0, 4, [-1])},
        {"a": entry(0, 4, [True])},
        {"a": entry(0, 4, [1 << 63])},
        {"a": entry(0, 4, [1.0])},  # type: ignore[list-item]
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": entry(0, 4, [1]), "b": entry(0, 4, [1])},
        {"a": entry(0, 400, [100])},
    ],
)
def test_a_header_that_does_not_hold_together_is_refused(tmp_path: Path, header: object) -> None:
    write_raw(tmp_path / SINGLE_FILE, header, bytes(8))
    with pytest.raises(ModelError, match=SINGLE_FILE):
        read_header(tmp_path / SINGLE_FILE)


def test_a_header_length_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_header(tmp_path / SINGLE_FILE)


def test_tensors_of_other_kinds_may_lie_in_the_file_and_are_not_read(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE_FILE, {"mask": entry(0, 8, [8], "BOOL"), "a": entry(8, 12, [1])}, bytes(12))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read_into("a", torch.ones(1))
    with pytest.raises(ModelUnsupported, match="BOOL"):
        checkpoint.read_into("mask", torch.empty(8))


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE_FILE, {"a": entry(0, 4, [1], "F4_MYSTERY")}, bytes(4))
    with pytest.raises(ModelUnsupported, match="F4_MYSTERY"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_safetensors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        Checkpoint.open(tmp_path)


def test_fills_a_module_from_the_meta_device_and_shares_tied_tensors(tmp_path: Path) -> None:
    save_file({"embedding": torch.randn(6, 4), "norm": torch.randn(4)}, tmp_path / SINGLE_FILE)
    with torch.device("meta"):
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
        module["norm"] = torch.nn.LayerNorm(4, bias=False)
    seen: list[float] = []
    sources = {"embed.weight": "embedding", "head.weight": "embedding", "norm.weight": "norm"}
    loaded = load_parameters(module, Checkpoint.open(tmp_path), sources, torch.float64, "cpu", progress=seen.append)
    assert module["embed"].weight is module["head"].weight
    assert loaded == (6 * 4 + 4) * 8
    assert not any(each.is_meta or each.requires_grad for each in module.parameters())
    assert torch.isfinite(module["head"](torch.ones(1, 4, dtype=torch.float64))).all()
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_all_weights_of_a_load_pass_through_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(3, 5), "b": torch.ones(4, 3)}, tmp_path / SINGLE_FILE)
    module = torch.nn.ModuleList(torch.nn.Linear(*size, bias=False, device="meta") for size in ((5, 3), (3, 4)))
    places = []
    take = Staging.buffer

    def noted(staging: Staging, dtype: torch.dtype) -> torch.Tensor:
        buffer = take(staging, dtype)
        places.append((id(staging), buffer.data_ptr()))
        return buffer

    monkeypatch.setattr(Staging, "buffer", noted)
    sources = {"0.weight": "a", "1.weight": "b"}
    load_parameters(module, Checkpoint.open(tmp_path), sources, torch.float64, "cpu")
    assert len(places) == 2 and len(set(places)) == 1


def test_a_parameter_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4)}, tmp_path / SINGLE_FILE)
    module = torch.nn.Linear(5, 3, bias=False, device="meta")
    with pytest.raises(ModelError, match=r"\(3, 4\).*\(3, 5\)"):
        load_parameters(module, Checkpoint.open(tmp_path), {"weight": "a"}, torch.float32, "cpu")


LOAD = """
import json, sys
import torch
from peerllm.models.checkpoint import Checkpoint, load_parameters

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

folder, first, last, width, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
torch.ones(8) @ torch.ones(8)
before = peak()
with torch.device("meta"):
    module = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(last - first))
sources = {f"{i}.weight": f"layers.{first + i}.weight" for i in range(last - first)}
share = load_parameters(module, Checkpoint.open(folder), sources, getattr(torch, dtype), "cpu")
print(json.dumps({"grown": peak() - before, "share": share}))
"""


@pytest.mark.parametrize(
    ("first", "last", "dtype"), [(0, 8, "float16"), (16, 32, "float16"), (0, 4, "float32"), (0, 4, "bfloat16")]
)
def test_peak_memory_is_the_share_of_a_two_gigabyte_checkpoint(
    tmp_path: Path, first: int, last: int, dtype: str
) -> None:
    width, layers = 6144, 32
    size = width * width * 2
    header = {f"layers.{i}.weight": entry(i * size, (i + 1) * size, [width, width], "F16") for i in range(layers)}
    path = tmp_path / SINGLE_FILE
    write_raw(path, header, b"")
    with path.open("r+b") as file:
        # A hole: two gigabytes that take no room and no time to write.
        file.truncate(path.stat().st_size + layers * size)
    assert path.stat().st_size > 2e9
    command = [sys.executable, "-c", LOAD, str(tmp_path), str(first), str(last), str(width), dtype]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)
    print(report)
    assert report["share"] == (last - first) * width * width * (4 if dtype == "float32" else 2)
    assert report["share"] * 0.9 < report["grown"] < report["share"] * 1.1 + 64 * limits.MIB
