"""Models that the engine's tests share, built once a session."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny_models


@dataclasses.dataclass
class Tiny:
    folder: Path
    draft: Path
    whole: PreTrainedModel
    prompts: list[list[int]]
    tokenizer: PreTrainedTokenizerFast
    vocabulary: int = 304


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function from a family's name to its tiny model; qwen2 has tied embeddings."""
    made: dict[str, Tiny] = {}

    def get(family: str) -> Tiny:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            folder = tiny_models.make_model(root / "target", family, is_tied=family == "qwen2")
            draft = tiny_models.make_draft(root / "draft", folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
            prompts = [tokenizer.encode(text) for text in tiny_models.PROMPTS]
            made[family] = Tiny(folder, draft, tiny_models.load_whole(folder), prompts, tokenizer)
        return made[family]

    return get
