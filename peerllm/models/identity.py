"""Model identity: the hashes by which two peers see that they hold the same model.

It can be had from a part of the model: names come from the index, shapes from the config, dtypes of absent tensors from
present ones of the same kind. What is present is checked against that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peerllm.models.allowlist import ModelShape
from peerllm.models.cache import Progress, no_progress, sha256_of
from peerllm.models.checkpoint import Checkpoint
from peerllm.models.layout import all_tensors
from peerllm.protocol.errors import ModelError, ModelUnsupported
from peerllm.protocol.identity import ModelIdentity

_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_LAYER_NUMBER = re.compile(r"\.\d+\.")


def canonical_hash(value: Any) -> str:
    """sha256, lower-case hexadecimal, of `value` as canonical JSON: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_hash(shape: ModelShape) -> str:
    """Of the fields that change the result: listed here, by name, once and for all releases."""
    return canonical_hash(
        {
            "family": shape.family,
            "layers": shape.layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocabulary": shape.vocabulary,
            "activation": shape.activation,
            "norm_epsilon": shape.norm_epsilon,
            "attention_bias": shape.attention_bias,
            "mlp_bias": shape.mlp_bias,
            "tied": shape.tied,
            "rope": dict(shape.rope),
        }
    )


def vocabulary_hash(folder: Path) -> str:
    """Of the map from token to id, added tokens included.

    Raises:
        ModelError: there is no tokenizer.json, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnsupported(f"{folder} has no tokenizer.json, which is needed here")
    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read: {str(error)[:500]}") from error
    return canonical_hash(tokens)


def tensor_dtypes(shape: ModelShape, names: frozenset[str], known: Mapping[str, str], default: str) -> dict[str, str]:
    """The dtype of each tensor of the model.

    Args:
        names: all tensors that the checkpoint has.
        known: dtypes from the headers at hand.
        default: for tensors of whose kind none is at hand.

    Raises:
        ModelError: the checkpoint lacks a tensor that the model needs.
    """
    wanted = all_tensors(shape)
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise ModelError(f"the checkpoint lacks tensor {missing!r}, which its config.json asks for")
    kinds = {_LAYER_NUMBER.sub(".*.", name): dtype for name, dtype in known.items()}
    return {name: known.get(name) or kinds.get(_LAYER_NUMBER.sub(".*.", name), default) for name in wanted}


def tensors_hash(shape: ModelShape, dtypes: Mapping[str, str]) -> str:
    """Of the sorted (tensor, dtype, shape) of what the model reads."""
    return canonical_hash(sorted([name, dtypes[name], list(size)] for name, size in all_tensors(shape).items()))


def check_entries(shape: ModelShape, entries: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
    """Raises ModelError where a tensor at hand (dtype, shape) is not what config.json says."""
    for name, size in all_tensors(shape).items():
        if name in entries and entries[name][1] != size:
            raise ModelError(f"{where}: tensor {name!r} has shape {entries[name][1]}; config.json says {size}")


def main_dtype(dtypes: Mapping[str, str]) -> str:
    """The dtype that most tensors have."""
    return Counter(dtypes.values()).most_common(1)[0][0]


def file_hashes(folder: Path, files: set[str], progress: Progress = no_progress) -> dict[str, str]:
    """sha256 of those weight files that are here: from the hub's cache, which names a file by it, or hashed once."""
    found = {}
    for name in sorted(files):
        path = folder / name
        if not path.exists():
            continue
        blob = path.resolve().name if path.is_symlink() else ""
        found[name] = blob if _BLOB_NAME.fullmatch(blob) else sha256_of(path, progress)
    return found


def folder_identity(
    folder: Path, shape: ModelShape, checkpoint: Checkpoint, progress: Progress = no_progress
) -> tuple[ModelIdentity, dict[str, str]]:
    """The identity of a local folder, whole or in part, and each tensor's dtype.

    Raises:
        ModelError: config, tokenizer and weights do not belong together.
    """
    entries = {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in checkpoint.names()}
    check_entries(shape, entries, str(folder))
    known = {name: dtype for name, (dtype, _) in entries.items() if name in all_tensors(shape)}
    default = main_dtype(known) if known else shape.dtype
    if default is None:
        raise ModelError(f"{folder} does not say of which dtype its weights are, and none of them is here")
    dtypes = tensor_dtypes(shape, checkpoint.all_names(), known, default)
    identity = ModelIdentity(
        config=config_hash(shape),
        vocabulary=vocabulary_hash(folder),
        tensors=tensors_hash(shape, dtypes),
        layers=shape.layers,
        files=file_hashes(folder, set(checkpoint.files().values()), progress),
    )
    return identity, dtypes
