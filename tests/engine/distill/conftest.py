"""A tiny target that ends its turns, and runs of it that take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peerllm.engine.distill.options import Settings
from peerllm.engine.distill.run import Distillation
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import load_weights
from peerllm.protocol.identity import LayerRange
from tests import tiny_models

QUICK = {
    "layers": 2,
    "vocab_top": 200,
    "tokens": 2_000,
    "prompt_tokens": 24,
    "answer_tokens": 24,
    "step_tokens": 512,
    "learning_rate": 2e-3,
    "held_out_every": 8,
}


def make_target(folder: Path, **options: Any) -> Path:
    """A tiny model that says the end's token about once in ten: random ones hardly ever do."""
    from safetensors.torch import load_file, save_file

    tiny_models.make_model(folder, "llama", **{"layers": 3, "kv_heads": 2, **options})
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[name][1] *= 1.6
    save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


def load_whole(folder: Path) -> ModelSlice:
    config = read_config(folder)
    part = ModelSlice(config, LayerRange(0, config.num_hidden_layers))
    load_weights(part, folder, torch.float32, "cpu", lambda stage, fraction: None)
    part.prepare(256)
    return part


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.fixture
def distil(target: Path, tmp_path: Path):
    """A function: a run of the tiny target into `tmp_path / out`, and the lines that it said."""

    def make(*, wishes: dict[str, Any] | None = None, **options: Any) -> tuple[Distillation, list[str]]:
        lines: list[str] = []
        more = {name: options.pop(name) for name in ("is_stopping", "clock") if name in options}
        settings = Settings(
            **{
                "target": str(target),
                "out": tmp_path / "out",
                "slots": 32,
                "device": "cpu",
                "evaluation_prompts": 2,
                "report_seconds": 3600.0,
                **options,
            }
        )
        said = {**QUICK, **(wishes or {})}
        run = Distillation(settings, said, say=lines.append, progress=lambda *_: None, **more)
        return run, lines

    return make
