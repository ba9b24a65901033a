"""Drafts that `peerllm distill` made: the target's embedding, some layers, a head of some of the target's tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peerllm.engine.machine import indexed
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import Progress
from peerllm.models.checkpoint import Checkpoint, Staging, load_parameters
from peerllm.models.drafts import HEAD_ROWS, check_target
from peerllm.models.layout import EMBEDDING
from peerllm.protocol.errors import DraftMismatch, ModelError
from peerllm.protocol.identity import LayerRange


class CutSlice(ModelSlice):
    """A whole small model whose head has rows for `tokens` alone, on the meta device until weights are loaded.

    Args:
        tokens: int64, ascending: the target's ids of the head's rows.
    """

    def __init__(self, config: Any, tokens: torch.Tensor) -> None:
        super().__init__(config, LayerRange(0, config.num_hidden_layers))
        # The cut head is no longer the embedding, whose rows it may be copies of.
        self.shape = replace(self.shape, is_tied=False)
        with torch.device("meta"):
            self.head = nn.Linear(config.hidden_size, len(tokens), bias=False)
        self.head.requires_grad_(False)
        self.head_tokens = tokens
        self.is_embedding_shared = False
        """Whether the embedding's memory is another model's."""

    def own_map(self) -> dict[str, str]:
        """`weight_map` of what a draft's folder holds: layers and norm."""
        return {name: tensor for name, tensor in self.weight_map().items() if not name.startswith(("embed", "head"))}

    @property
    def byte_count(self) -> int:
        size = super().byte_count
        if self.is_embedding_shared and self.embed is not None:
            size -= self.embed.weight.numel() * self.embed.weight.element_size()
        return size


def load_distilled(
    folder: Path | str,
    target: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    embedding: torch.Tensor | None = None,
    progress: Progress,
) -> CutSlice:
    """The draft in `folder`, with weights.

    Args:
        target: the target's folder, with the file that holds its embedding.
        embedding: the target's `[vocabulary, width]`; taken as it is where it is on `device` in `dtype`, and read from
            `target` otherwise.

    Raises:
        DraftMismatch: it was made for another target or tokenizer.
        ModelError: damaged, or `target` lacks its embedding.
    """
    folder = Path(folder)
    draft = check_target(folder, target, progress)
    config, whole = read_config(folder), read_config(target)
    if (config.hidden_size, config.vocab_size) != (whole.hidden_size, whole.vocab_size):
        raise DraftMismatch(f"{folder} has another width or vocabulary than its target")
    device = torch.device(device)
    tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=device)
    part = CutSlice(config, tokens)
    checkpoint = Checkpoint.open(folder)
    load_parameters(part, checkpoint, part.own_map(), dtype, device, partial(progress, "reading the draft model"))
    if embedding is not None and embedding.device == indexed(device) and embedding.dtype == dtype:
        part.is_embedding_shared = True
    else:
        embedding = torch.empty(whole.vocab_size, whole.hidden_size, dtype=dtype, device=device)
        Checkpoint.open(target).read_into(EMBEDDING, embedding, Staging())
    give_embedding(part, embedding)
    if draft.is_head_stored:
        if checkpoint.shape(HEAD_ROWS) != (len(draft.tokens), config.hidden_size):
            raise ModelError(f"{folder}: {HEAD_ROWS} has shape {checkpoint.shape(HEAD_ROWS)}; draft.json says another")
        rows = torch.empty(len(draft.tokens), config.hidden_size, dtype=dtype, device=device)
        checkpoint.read_into(HEAD_ROWS, rows, Staging())
    else:
        rows = embedding.index_select(0, tokens)
    give_head(part, rows)
    return part


def give_embedding(part: CutSlice, embedding: torch.Tensor) -> None:
    """The embedding's memory is `embedding`'s, frozen."""
    if part.embed is None:
        raise RuntimeError("a draft begins with the embedding")
    part.embed.weight = nn.Parameter(embedding, requires_grad=False)


def give_head(part: CutSlice, rows: torch.Tensor) -> None:
    """`rows` `[tokens, width]`, frozen."""
    if part.head is None:
        raise RuntimeError("a draft ends with the head")
    part.head.weight = nn.Parameter(rows, requires_grad=False)
