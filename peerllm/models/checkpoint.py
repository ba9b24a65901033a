"""Weights out of safetensors files, without mmap: mapped pages count as the process's own memory once they are touched.

The format: a little-endian uint64 with the header's length, the header (JSON: name to dtype, shape and offsets within
the data), the data. What the header says is checked against the file before any of it is used.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerllm.protocol import limits
from peerllm.protocol.errors import ModelError, ModelUnsupported

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes that an unquantised checkpoint may have, by torch's names."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_DTYPES = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "C64"}
"""Of tensors that no layer of ours uses (old checkpoints keep masks); such a tensor may lie in the file unread."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `dtype` is torch's name for it, or safetensors' own for one that we do not read."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file.

    Raises:
        ModelError: the file is truncated or corrupt; names it.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                raise ModelError(f"{path} is truncated: {total} bytes are too few for a safetensors file")
            length = _LENGTH.unpack(start)[0]
            if length > limits.MAX_CHECKPOINT_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file: its header would take {length} bytes")
            return parse_header(file.read(length), length, total, str(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_header(header: bytes, length: int, total: int, name: str) -> dict[str, TensorEntry]:
    """The tensors that `header` lists: `length` bytes announced, in a file of `total` bytes called `name`.

    Raises:
        ModelError: truncated or corrupt.
    """
    if len(header) < length:
        raise ModelError(f"{name} is truncated: its header has {len(header)} of {length} bytes")
    try:
        listed = json.loads(header, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is corrupt: its header is not readable JSON") from error
    if not isinstance(listed, dict):
        raise ModelError(f"{name} is corrupt: its header is not a map")
    listed.pop("__metadata__", None)
    base = _LENGTH.size + length
    tensors = {tensor: _entry(entry, base, f"{name}: tensor {tensor[:200]!r}") for tensor, entry in listed.items()}
    spans = sorted((entry.offset, entry.offset + entry.size) for entry in tensors.values())
    if any(start < end for (_, end), (start, _) in pairwise(spans)):
        raise ModelError(f"{name} is corrupt: two of its tensors overlap")
    end = spans[-1][1] if spans else base
    if end > total:
        raise ModelError(f"{name} is truncated: {total} bytes, its tensors need {end}; fetch or copy it again")
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _entry(entry: Any, base: int, name: str) -> TensorEntry:
    if not isinstance(entry, dict):
        raise ModelError(f"{name} is not a map")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise ModelError(f"{name} has no valid dtype")
    if dtype not in _DTYPES and dtype not in _OTHER_DTYPES:
        raise ModelUnsupported(f"{name} has dtype {dtype[:32]!r}, which is not known here")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_count(size) for size in shape):
        raise ModelError(f"{name} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ModelError(f"{name} has no valid offsets")
    size = offsets[1] - offsets[0]
    if dtype in _DTYPES:
        expected = DTYPE_BYTES[_DTYPES[dtype]]
        for count in shape:
            expected *= count
        if size != expected:
            raise ModelError(f"{name} has {size} bytes where its shape needs {expected}")
    elif size < 0:
        raise ModelError(f"{name} has no valid offsets")
    return TensorEntry(_DTYPES.get(dtype, dtype), tuple(shape), base + offsets[0], size)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's folder.

    Raises:
        ModelError: not there, too large, or not a JSON object; names the file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits.MAX_MODEL_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > limits.MAX_MODEL_JSON_BYTES:
        raise ModelError(f"{path} has more than {limits.MAX_MODEL_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, from an index of several files.

    Raises:
        ModelError: corrupt, or it names a file outside its folder.
    """
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{path} has no weight_map")
    for file in set(map(str, listed.values())):
        if "/" in file or "\\" in file or not file.endswith(".safetensors") or file.startswith("."):
            raise ModelError(f"{path} names {file[:200]!r}, which is not a safetensors file beside it")
    return {tensor: str(file) for tensor, file in listed.items()}


class Staging:
    """Memory of WEIGHT_STAGING_BYTES that weights pass through, made when it is first needed.

    One for a whole load: made and freed for each tensor, it left holes among the weights that nothing fitted in, and
    a slice of 2.4 GiB took 3.0.
    """

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, as elements of `dtype`."""
        import torch

        if self._bytes is None:
            self._bytes = torch.empty(limits.WEIGHT_STAGING_BYTES, dtype=torch.uint8)
        return self._bytes.view(dtype)


class Checkpoint:
    """The weights of one folder: one file, or those of an index that are there. Keeps no file open between reads."""

    def __init__(self, folder: Path, files: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self._files = files
        self._entries = entries

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the headers. Files of the index that are absent (other peers hold those layers) are left out.

        Raises:
            ModelError: no safetensors here, or a file of it is truncated or corrupt.
        """
        folder = Path(folder)
        if (folder / INDEX_FILE).exists():
            files = read_index(folder / INDEX_FILE)
        elif (folder / SINGLE_FILE).exists():
            files = dict.fromkeys(read_header(folder / SINGLE_FILE), SINGLE_FILE)
        else:
            raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        entries: dict[str, TensorEntry] = {}
        for file in sorted(set(files.values())):
            if not (folder / file).exists():
                continue
            header = read_header(folder / file)
            named = [tensor for tensor, where in files.items() if where == file]
            missing = next((tensor for tensor in named if tensor not in header), None)
            if missing is not None:
                raise ModelError(f"{folder / file} lacks tensor {missing!r}, which {INDEX_FILE} places there")
            entries |= {tensor: header[tensor] for tensor in named}
        return cls(folder, files, entries)

    def names(self) -> frozenset[str]:
        """Tensors that can be read."""
        return frozenset(self._entries)

    def all_names(self) -> frozenset[str]:
        """Tensors of the whole model, also those in files that are not here."""
        return frozenset(self._files)

    def files(self) -> dict[str, str]:
        """Tensor name to file name, of the whole model."""
        return dict(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """torch's name of the dtype, such as `bfloat16`."""
        return self._entry(name).dtype

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            file = self._files.get(name)
            where = f"its file {file} is not there" if file else "no file has it"
            raise ModelError(f"{self.folder} lacks tensor {name!r}: {where}")
        return entry

    def read_into(self, name: str, target: torch.Tensor, staging: Staging | None = None) -> None:
        """Fills `target` (contiguous, of the tensor's shape, any float dtype and device) with tensor `name`.

        The bytes go straight into the target's memory when it is on the CPU in the file's dtype, and otherwise through
        `staging`; who reads many tensors passes the same one each time.

        Raises:
            ModelError: no such tensor here, or the file has changed or cannot be read.
            ValueError: the target has another shape or is not contiguous.
        """
        import torch

        entry = self._entry(name)
        if tuple(target.shape) != entry.shape or not target.is_contiguous():
            raise ValueError(f"{name}: a contiguous target of shape {entry.shape} is needed, not {tuple(target.shape)}")
        if entry.dtype not in DTYPE_BYTES:
            raise ModelUnsupported(f"{self.folder}: tensor {name!r} has dtype {entry.dtype}")
        if entry.size == 0:
            return
        dtype: torch.dtype = getattr(torch, entry.dtype)
        path = self.folder / self._files[name]
        flat = target.detach().view(-1)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            if flat.device.type == "cpu" and flat.dtype == dtype:
                _read_exactly(descriptor, path, flat, entry.offset)
                return
            buffer = (staging or Staging()).buffer(dtype)
            for start in range(0, flat.numel(), buffer.numel()):
                piece = buffer[: flat.numel() - start]
                _read_exactly(descriptor, path, piece, entry.offset + start * DTYPE_BYTES[entry.dtype])
                flat[start : start + piece.numel()].copy_(piece)
        finally:
            os.close(descriptor)


def _read_exactly(descriptor: int, path: Path, target: torch.Tensor, offset: int) -> None:
    """Bytes at `offset` of the file into a one-dimensional CPU tensor's own memory."""
    import torch

    view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        try:
            # One call moves at most 2 GiB on Linux.
            got = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        if got == 0:
            raise ModelError(f"{path} has become shorter while it was read")
        done += got


def load_parameters(
    module: torch.nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
) -> int:
    """Gives `module`'s parameters (on the meta device until now) their weights, one tensor at a time.

    Args:
        sources: parameter name in `module` to tensor name in `checkpoint`. Names of the same tensor share one
            parameter, so that tied embeddings are held once.
        progress: gets the fraction of bytes that is done, after every tensor.

    Returns:
        Bytes that the parameters take, at `dtype`.

    Raises:
        ModelError: a tensor is missing, of another shape than the parameter, or unreadable.
    """
    import torch

    wanted = sum(checkpoint._entry(tensor).size for tensor in sources.values())
    staging = Staging()
    held: dict[str, torch.nn.Parameter] = {}
    loaded = done = 0
    for name, tensor in sources.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shape = tuple(owner.get_parameter(attribute).shape)
        if checkpoint.shape(tensor) != shape:
            raise ModelError(
                f"{checkpoint.folder}: tensor {tensor!r} has shape {checkpoint.shape(tensor)}; the model needs {shape}"
            )
        if tensor not in held:
            memory = torch.empty(shape, dtype=dtype, device=device)
            checkpoint.read_into(tensor, memory, staging)
            held[tensor] = torch.nn.Parameter(memory, requires_grad=False)
            loaded += memory.nbytes
        setattr(owner, attribute, held[tensor])
        done += checkpoint._entry(tensor).size
        if progress is not None:
            progress(done / max(wanted, 1))
    return loaded
