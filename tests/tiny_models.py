"""Small random models of the supported families, with a real tokenizer, as folders that transformers and we can load.

Weights are wide on purpose: with transformers' own initialisation a small model's logits are so close to each other
that near ties would be the rule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = (
    "The tide comes in twice a day.",
    "Once upon a time there was a lighthouse",
    "def add(a, b):\n    return",
    "one two three four one two three",
    "Émile naïve café ☕ 日本語",
    "a",
    "  spaces   and\ttabs\n\n",
    "1234567890 9876543210",
    "What is the capital of the moon?",
    "the the the the the the the the",
    "SELECT name FROM peers WHERE layers > 4;",
    "It was the best of times, it was the worst of times",
    '{"key": [1, 2, 3], "other": null}',
    "Write a short poem about rain and iron.",
    "x = y + z; y = x - z; z = x * y;",
    "🙂🙃🙂🙃",
    "A long sentence that goes on for a while so that the prompt has more tokens than the others have, and more still.",
    "Ω≈ç√∫",
    "no punctuation at all here just words",
    "The end.",
    "abc abc abd abc abc",
    "Zwei Boxkämpfer jagen Eva quer über den großen Sylter Deich.",
)
_CORPUS = [*PROMPTS, "the tide and the moon and the peers of the room answer one another over the link " * 4]


def make_tokenizer(folder: Path, *, has_chat_template: bool = True, vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text, and characters that span tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    if has_chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def make_model(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    is_tied: bool = False,
    seed: int = 0,
    vocabulary: int = 304,
    context: int = 512,
    shards: int = 1,
    has_chat_template: bool = True,
    **config_options: Any,
) -> Path:
    """Writes config, tokenizer, generation_config and safetensors; gives the folder.

    `vocabulary` is the embedding's size, which may be padded beyond the tokenizer's 300.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, has_chat_template=has_chat_template)
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": is_tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.15,
        "dtype": "float32",
    }
    if family == "mistral":
        options["sliding_window"] = None
    if family in ("qwen3", "mistral"):
        options["head_dim"] = hidden // heads
    kinds = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }
    config_class, model_class = kinds[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**options, **config_options)).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                # Ones and zeros would hide a norm or a bias that is left out.
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("embed_tokens.weight"):
                # A tied head says its own input again unless the layers outweigh the embedding.
                parameter.normal_(std=0.1 if is_tied else 0.5)
            elif name == "lm_head.weight":
                parameter.normal_(std=0.5)
    size = sum(each.numel() * 4 for each in model.parameters())
    model.save_pretrained(str(folder), max_shard_size=size // shards + 1 if shards > 1 else "5GB")
    generation = {"eos_token_id": [tokenizer.eos_token_id], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def make_draft(folder: Path, target: Path, *, blur: float = 0.02, seed: int = 1) -> Path:
    """A draft that agrees with `target` often, not always: the target with noise of `blur` on its weights. Its head
    is 8 columns wider, as padding makes real ones (bugs.md 17)."""
    folder.mkdir(parents=True, exist_ok=True)
    model = load_whole(target)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * blur * parameter.std().nan_to_num())
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target / name).exists():
            (folder / name).write_bytes((target / name).read_bytes())
    return folder


def load_whole(folder: Path) -> PreTrainedModel:
    """The reference: transformers' own model, fp32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def generate_greedily(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """transformers' own greedy answer, with generation_config's sampling and penalties off and no EOS."""
    from transformers import GenerationConfig

    plain = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.generation_config = GenerationConfig(pad_token_id=0)
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), generation_config=plain, attention_mask=torch.ones(1, len(prompt)))
    return out[0, len(prompt) :].tolist()
