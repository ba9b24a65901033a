from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peerllm.models.allowlist import ARCHITECTURES, check_config, check_files, check_folder
from peerllm.models.layout import all_tensors, range_tensors
from peerllm.protocol.errors import ModelError, ModelNotFound, ModelUnsupported
from peerllm.protocol.identity import LayerRange

FAMILIES = sorted(ARCHITECTURES)
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "max_position_embeddings": 2048},
]


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    plain = {
        "model_type": family,
        "architectures": [ARCHITECTURES.get(family, "Other")],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "sliding_window": None,
    }
    return plain | changes


def shape(family: str = "llama", **changes: Any) -> Any:
    return check_config(config(family, **changes), "M")


def reference(family: str, values: dict[str, Any]) -> Any:
    kind = getattr(transformers, ARCHITECTURES[family])
    return kind.config_class(**{name: value for name, value in values.items() if name != "model_type"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_knows_every_tensor_and_shape_of_each_family(family: str, is_tied: bool, has_bias: bool) -> None:
    values = config(family, tie_word_embeddings=is_tied, head_dim=24)
    if has_bias and family in ("llama", "qwen3"):
        values["attention_bias"] = True
    if has_bias and family == "llama":
        values["mlp_bias"] = True
    with torch.device("meta"):
        model = getattr(transformers, ARCHITECTURES[family])(reference(family, values))
    expected = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert all_tensors(check_config(values, "M")) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [{}, *ROPES])
def test_fills_in_the_defaults_that_transformers_takes(family: str, rope: dict[str, Any]) -> None:
    values = config(family, **rope)
    if family != "llama":
        del values["num_key_value_heads"]
        values["num_attention_heads"] = 32
        values["hidden_size"] = 256
    theirs = reference(family, json.loads(json.dumps(values)))
    ours = check_config(values, "M")
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.activation == theirs.hidden_act
    assert ours.tied == theirs.tie_word_embeddings
    parameters = dict(theirs.rope_parameters)
    assert ours.rope["type"] == parameters["rope_type"]
    assert ours.rope["theta"] == parameters["rope_theta"]
    for name, value in ours.rope.items():
        if name not in ("type", "theta", "truncate"):
            assert parameters.get(name) == value, name


def test_a_layer_range_needs_its_layers_and_its_edges_only() -> None:
    for is_tied in (False, True):
        model = shape(tie_word_embeddings=is_tied)
        first, middle, last = (set(range_tensors(model, LayerRange(i, i + 1))) for i in range(3))
        assert first | middle | last == set(all_tensors(model))
        assert "model.embed_tokens.weight" in first
        assert "model.embed_tokens.weight" not in middle and "model.norm.weight" not in middle
        assert ("model.embed_tokens.weight" in last) == is_tied
        assert ("lm_head.weight" in last) != is_tied
        assert "model.norm.weight" in last and "model.norm.weight" not in first
        assert {name.split(".")[2] for name in middle} == {"1"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, "gemma2.*supported are llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "None"),
    ({"model_type": ["llama"]}, "supported are"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "code of its own"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ({"compression_config": {"quant_method": "x"}}, "quantised"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "full attention"),
    ({"layer_types": "sliding"}, "full attention"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
    ({"partial_rotary_factor": 0.5}, "part of each head"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is needed"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"torch_dtype": "float8_e4m3fn"}, "float8"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_refuses_what_it_would_compute_wrongly(changes: dict[str, Any], reason: str) -> None:
    family = changes.get("model_type") or "llama"
    values = config(family if isinstance(family, str) else "llama") | changes
    with pytest.raises(ModelUnsupported, match=reason):
        check_config(values, "M")


def test_mistral_slides_unless_its_config_says_null() -> None:
    values = config("mistral")
    check_config(values, "M")
    del values["sliding_window"]
    with pytest.raises(ModelUnsupported, match="sliding-window"):
        check_config(values, "M")


def test_qwen_with_its_sliding_window_switched_off_is_taken() -> None:
    assert shape("qwen2", use_sliding_window=False, sliding_window=131072).attention_bias


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"hidden_size": "64"},
        {"hidden_size": True},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 100_000},
        {"vocab_size": 1 << 40},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("inf")},
        {"tie_word_embeddings": "yes"},
        {"hidden_act": 5},
        {"num_key_value_heads": 3},
        {"rope_theta": "many"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
    ],
)
def test_a_broken_field_is_an_error_that_names_the_model(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="M"):
        check_config(config() | changes, "M")


def test_pickle_only_weights_are_refused_and_safetensors_beside_them_are_taken() -> None:
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.ckpt"):
        with pytest.raises(ModelUnsupported, match="pickle"):
            check_files(["config.json", name], "M")
    check_files(["pytorch_model.bin", "model.safetensors"], "M")
    with pytest.raises(ModelNotFound, match="no weights"):
        check_files(["config.json"], "M")


def test_a_folder_is_refused_for_its_tokenizers_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "model.safetensors").touch()
    check_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["a.B", None]}}))
    with pytest.raises(ModelUnsupported, match="tokenizer brings code"):
        check_folder(tmp_path)


def test_a_folder_without_a_config_or_with_a_broken_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        check_folder(tmp_path)
    for content in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            check_folder(tmp_path)
