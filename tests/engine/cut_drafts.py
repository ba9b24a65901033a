"""Drafts with the target's embedding and a cut head, made without training."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from peerllm.models import drafts
from peerllm.models.checkpoint import Checkpoint
from peerllm.models.drafts import DraftFile


def whole_draft(folder: Path, target: Path, tokens: list[int]) -> Path:
    """A draft with all of the target's layers, so that it is right wherever its head has the target's token."""
    from safetensors.torch import save_file

    folder.mkdir()
    checkpoint = Checkpoint.open(target)
    config = json.loads((target / "config.json").read_text())
    tensors = {}
    for name in checkpoint.names() - {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = torch.empty(checkpoint.shape(name))
        checkpoint.read_into(name, tensors[name])
    if not config["tie_word_embeddings"]:
        head = torch.empty(checkpoint.shape("lm_head.weight"))
        checkpoint.read_into("lm_head.weight", head)
        tensors[drafts.HEAD_ROWS] = head[tokens].contiguous()
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    said = DraftFile(
        drafts.identity_of(target), "tiny", tuple(tokens), is_head_stored=not config["tie_word_embeddings"]
    )
    (folder / drafts.DRAFT_FILE).write_text(json.dumps(said.to_map()))
    return folder
