"""Which models may be loaded: four families with full attention, unquantised, and nothing that runs code of its own.

Whatever changes the result and is not known here would be computed wrongly without a word; so it is refused, with the
reason, before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerllm.models.checkpoint import DTYPE_BYTES, INDEX_FILE, SINGLE_FILE, read_json
from peerllm.protocol import limits
from peerllm.protocol.errors import ModelError, ModelNotFound, ModelUnsupported

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "linear": {},
    "default": {},
    "yarn": {
        "factor": None,
        "attention_factor": None,
        "beta_fast": None,
        "beta_slow": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
}
_KV_HEADS = {"qwen2": 32, "qwen3": 32, "mistral": 8}
"""What transformers takes where a config does not say; llama takes as many as there are heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a config.json changes the result, with transformers' defaults filled in; `models.identity` hashes it."""

    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    activation: str
    norm_epsilon: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Type, theta, and the parameters that its type reads."""
    max_context: int
    dtype: str | None = None
    """What the config says of the weights. Not hashed: the tensors themselves are."""


def check_folder(folder: Path) -> ModelShape:
    """The shape of a local model.

    Raises:
        ModelNotFound: no config.json there.
        ModelUnsupported: refused, with the reason.
        ModelError: config.json is broken.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} holds no model: there is no config.json")
    shape = read_shape(folder)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file() and read_json(tokenizer).get("auto_map"):
        raise ModelUnsupported(f"{folder}: its tokenizer brings code of its own (auto_map), which is never run")
    check_files([path.name for path in folder.iterdir()], str(folder))
    return shape


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model whose weights may all be absent still. Raises ModelUnsupported, ModelError."""
    return check_config(read_json(folder / "config.json"), str(folder))


def check_files(names: list[str], where: str) -> None:
    """Raises ModelUnsupported for weights that are only there as pickle, ModelNotFound where there are none at all."""
    if SINGLE_FILE in names or INDEX_FILE in names:
        return
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        raise ModelUnsupported(
            f"{where} has its weights as pickle, which runs code when it is opened; only safetensors are read"
        )
    raise ModelNotFound(f"{where} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def check_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that `config` (a parsed config.json of the model `where`) describes.

    Raises:
        ModelUnsupported: refused, with the reason.
        ModelError: a field is missing or is not what it should be.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ModelUnsupported(
            f"{where} is a {str(family)[:64]!r} model; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    _refuse(config, family, where)
    read = _Reader(config, where)
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    kv_heads = read.count("num_key_value_heads", _KV_HEADS.get(family, heads))
    head_dim = read.count("head_dim", 128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{where}: {heads} heads of {head_dim} cannot share {kv_heads} key-value heads")
    max_context = read.count("max_position_embeddings")
    return ModelShape(
        family=family,
        layers=read.count("num_hidden_layers", maximum=limits.MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=read.count("vocab_size", maximum=limits.MAX_VOCABULARY),
        activation=read.words("hidden_act", "silu"),
        norm_epsilon=read.number("rms_norm_eps", 1e-6),
        # Qwen2 has its biases always, Mistral never; neither reads the field.
        attention_bias=family == "qwen2" or (family != "mistral" and read.switch("attention_bias")),
        mlp_bias=family == "llama" and read.switch("mlp_bias"),
        tied=read.switch("tie_word_embeddings"),
        rope=_rope(config, max_context, where),
        max_context=min(max_context, limits.MAX_CONTEXT),
        dtype=_dtype(config, where),
    )


def _refuse(config: Mapping[str, Any], family: str, where: str) -> None:
    if config.get("auto_map"):
        raise ModelUnsupported(f"{where} brings code of its own (auto_map), which is never run")
    named = config.get("architectures")
    if named and named != [ARCHITECTURES[family]]:
        raise ModelUnsupported(f"{where} is made for {str(named)[:200]}; {ARCHITECTURES[family]} is needed")
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            raise ModelUnsupported(f"{where} has quantised weights ({name}); only unquantised ones are read")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ModelUnsupported(f"{where} has layers with other than full attention (layer_types)")
    # Mistral slides unless the field says null; the Qwens only where a switch says so as well.
    slides = config.get("sliding_window", 4096) if family == "mistral" else config.get("use_sliding_window")
    if slides:
        raise ModelUnsupported(f"{where} has sliding-window attention; only full attention is supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "num_kv_shared_layers", "is_encoder_decoder"):
        if config.get(name):
            raise ModelUnsupported(f"{where} sets {name}, which is not supported")


def _rope(config: Mapping[str, Any], max_context: int, where: str) -> dict[str, Any]:
    # As transformers does: the older name wins, and what it lacks comes from the fields beside it.
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelUnsupported(f"{where} has rotary embeddings that differ between layers")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise ModelUnsupported(
            f"{where} has rotary embeddings of type {str(kind)[:64]!r}; supported are {', '.join(_ROPE_FIELDS)}"
        )
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelUnsupported(f"{where} rotates only a part of each head (partial_rotary_factor)")
    values = {"theta": 10_000.0, "original_max_position_embeddings": max_context} | _ROPE_DEFAULTS[kind]
    if config.get("rope_theta") is not None:
        values["theta"] = config["rope_theta"]
    if given.get("rope_theta") is not None:
        values["theta"] = given["rope_theta"]
    values |= {name: given[name] for name in _ROPE_FIELDS[kind] if given.get(name) is not None}
    rope: dict[str, Any] = {"type": kind}
    for name in ("theta", *_ROPE_FIELDS[kind]):
        if name not in values:
            raise ModelError(f"{where}: rotary embeddings of type {kind} need {name!r} in config.json")
        rope[name] = _rope_value(name, values[name], where)
    return rope


def _rope_value(name: str, value: Any, where: str) -> float | bool | None:
    if value is None or type(value) is bool:
        return value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ModelError(f"{where}: {name!r} of the rotary embeddings is not a number")
    return float(value)


def _dtype(config: Mapping[str, Any], where: str) -> str | None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelUnsupported(f"{where} has weights of dtype {str(dtype)[:32]!r}")
    return dtype


class _Reader:
    """Fields of one config, by kind. Raises ModelError that names the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def count(self, name: str, default: int | None = None, *, maximum: int = limits.MAX_WIDTH) -> int:
        value = self._get(name, default)
        if type(value) is not int or not 1 <= value <= maximum:
            raise ModelError(f"{self._where}: {name!r} in config.json is not a whole number from 1 to {maximum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self._where}: {name!r} in config.json is not a number")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self._get(name, False)
        if type(value) is not bool:
            raise ModelError(f"{self._where}: {name!r} in config.json is not true or false")
        return value

    def words(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > limits.MAX_NAME_CHARS:
            raise ModelError(f"{self._where}: {name!r} in config.json is not a short text")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self._where}: config.json lacks {name!r}")
        return default
