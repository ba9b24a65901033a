"""Planted models: real shapes, real work, and a next token that is known beforehand.

`python -m peerllm.engine.planted FOLDER --shape qwen2.5-7b` writes a model after whose token t comes t + 1, always;
with `--agree 0.8` it is a draft for it that says t + 2 after one token in five. All layers compute what real ones
compute, on weights that are not zero, but add next to nothing to the residual stream: what goes in is what the head
sees. So speed and acceptance can be measured end to end without any model's download, and an answer can be checked
token by token.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from peerllm.engine.codec import DTYPES
from peerllm.models.allowlist import ModelShape, check_config
from peerllm.models.layout import EMBEDDING, HEAD, NORM, layer_tensors

STD = 0.02
_WHISPER = 1e-3
"""What the two products that write to the residual stream are scaled by."""
_LINE_FEED, _SPACE = "\u010a", "\u0120"
"""As byte-level tokenizers write them."""
RESERVED = 8
"""The first tokens are special; the planted function never leads to them."""
ALPHABET = 256
"""The last tokens of the tokenizer are single bytes."""


def next_token(token: int, vocabulary: int) -> int:
    """What the target says after `token`."""
    return token + 1 if token + 1 < vocabulary else RESERVED


def wrong_token(token: int, vocabulary: int) -> int:
    """What a draft says where it disagrees."""
    return next_token(next_token(token, vocabulary), vocabulary)


def follows(vocabulary: int, disagreements: Collection[int]) -> list[int]:
    """What a model says after each token, wrong after `disagreements`."""
    return [
        wrong_token(token, vocabulary) if token in disagreements else next_token(token, vocabulary)
        for token in range(vocabulary)
    ]


def std_of(name: str) -> float:
    """The deviation of a layer's tensor of that name. Those that write to the residual stream whisper."""
    return STD * _WHISPER if name.endswith(("o_proj.weight", "down_proj.weight")) else STD


def random_disagreements(vocabulary: int, agreement: float, seed: int = 0) -> set[int]:
    """Tokens after which a draft is wrong, so that it agrees after a share of `agreement` of them."""
    chance = random.Random(seed)
    return {token for token in range(vocabulary) if chance.random() >= agreement}


def traced_disagreements(first: int, trace: Iterable[bool], vocabulary: int) -> set[int]:
    """The same from a recorded trace: whether the draft agreed at each place of an answer that follows token `first`.

    The planted sequence visits no token twice before the vocabulary is through, so a place is a token.
    """
    found, token = set(), first
    for agrees in trace:
        if not agrees:
            found.add(token)
        token = next_token(token, vocabulary)
    return found


def write_planted(
    folder: Path | str,
    config: Any,
    *,
    dtype: str = "float16",
    disagreements: Collection[int] = (),
    seed: int = 0,
) -> Path:
    """Writes the model as a Hugging Face folder: config, tokenizer (token i is ` t<i>`), a weight file a layer.

    Args:
        config: transformers' configuration. Embeddings are untied: a tied head says its input again.
        disagreements: tokens after which it says `wrong_token`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    shape = write_config(folder, config, dtype)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({key: value.to(DTYPES[dtype]).contiguous() for key, value in tensors.items()}, str(folder / name))
        files.update(dict.fromkeys(tensors, name))

    for layer in range(shape.layers):
        tensors = {}
        for name, size in layer_tensors(shape, layer).items():
            values = torch.empty(size).normal_(std=std_of(name), generator=generator)
            if name.endswith("norm.weight"):
                values += 1.0
            tensors[name] = values
        save(f"layer-{layer}.safetensors", tensors)
    vocabulary = shape.vocabulary
    embedding = torch.empty(vocabulary, shape.hidden_size).normal_(generator=generator)
    head = torch.empty_like(embedding).normal_(std=STD, generator=generator)
    head.index_add_(0, torch.tensor(follows(vocabulary, disagreements)), embedding * STD)
    edges = {EMBEDDING: embedding, NORM: torch.ones(shape.hidden_size), HEAD: head}
    save("edges.safetensors", edges)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder, vocabulary)
    return folder


def write_config(folder: Path, config: Any, dtype: str) -> ModelShape:
    """Writes config.json, and gives its shape."""
    folder.mkdir(parents=True, exist_ok=True)
    config.tie_word_embeddings = False
    plain = {name: value for name, value in config.to_dict().items() if value is not None}
    plain |= {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")], "eos_token_id": 0}
    plain |= {"dtype": dtype, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(plain, indent=1))
    return check_config(plain, str(folder))


def alphabet() -> list[str]:
    """The single bytes, as byte-level tokenizers write them, in the order of their tokens: the last `ALPHABET` ones."""
    from tokenizers import pre_tokenizers

    return [*sorted({*pre_tokenizers.ByteLevel.alphabet()} - {_LINE_FEED}), _LINE_FEED]


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Byte-level, as the real families' are, without merges: a prompt has a token for each byte. The alphabet stands
    last and in it the line feed, so that a prompt that ends with one leads to the first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|system|>"]
    letters = alphabet()
    words = {word: index for index, word in enumerate(special)}
    words |= {f"{_SPACE}t{index}": index for index in range(len(special), vocabulary - len(letters))}
    words |= {letter: vocabulary - len(letters) + index for index, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(words, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<|begin|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))


def main(arguments: list[str] | None = None) -> None:
    from safetensors import SafetensorError

    from peerllm.engine.shapes import NAMES, named_config

    parser = argparse.ArgumentParser(prog="python -m peerllm.engine.planted", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", required=True, choices=NAMES)
    parser.add_argument(
        "--agree", type=_share, default=1.0, help="share of tokens after which it agrees with the target"
    )
    parser.add_argument("--dtype", default="float16", choices=tuple(DTYPES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    config = named_config(options.shape)
    wrong = random_disagreements(config.vocab_size, options.agree, options.seed)
    try:
        write_planted(options.folder, config, dtype=options.dtype, disagreements=wrong, seed=options.seed)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        parser.exit(1, f"{parser.prog}: {options.folder} cannot be written: {why}\n")


def _share(words: str) -> float:
    value = float(words)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError("a share is from 0 to 1")
    return value


if __name__ == "__main__":
    main()
