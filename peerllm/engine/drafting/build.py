"""From what a user names (`none`, `ngram`, `model:PATH`) to a drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from peerllm.engine.drafting.base import Drafter, NoDrafter
from peerllm.engine.drafting.distilled import load_distilled
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.engine.drafting.ngram import NgramDrafter
from peerllm.engine.plans import cache_positions
from peerllm.engine.running import make_static
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import Progress, load_weights
from peerllm.models.drafts import is_draft
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, DraftMismatch
from peerllm.protocol.identity import LayerRange

_COLUMNS = 16


def build_drafter(
    spec: str,
    target: Path | str,
    *,
    vocabulary: int,
    slots: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device | str,
    path: str = "auto",
    embedding: torch.Tensor | None = None,
    progress: Progress,
) -> Drafter:
    """The drafter that `spec` names, for the target model in the folder `target`.

    Args:
        vocabulary: rows of the target's head.
        path: one of `running.PATHS`.
        embedding: the target's, for a draft that was made for it.

    Raises:
        BadRequest: `spec` is none of the three forms.
        DraftMismatch: the draft model's tokenizer is another, or it was made for another target.
        ModelError: the draft model cannot be loaded.
    """
    if spec == "none":
        return NoDrafter()
    if spec == "ngram":
        return NgramDrafter()
    kind, _, folder = spec.partition(":")
    if kind != "model" or not folder:
        raise BadRequest(f"a draft is none, ngram or model:PATH; got {spec[:64]!r}", param="draft")
    part: ModelSlice
    if is_draft(folder):
        part = load_distilled(folder, target, dtype, device, embedding=embedding, progress=progress)
    else:
        ids = check_same_tokenizer(target, folder)
        config = read_config(folder)
        part = ModelSlice(config, LayerRange(0, config.num_hidden_layers))
        load_weights(part, folder, dtype, device, progress, "reading the draft model")
        # Columns that no token of the target's can be are not computed. Loads of 16 bytes want an even count.
        part.cut_head(min(-(-ids // _COLUMNS) * _COLUMNS, part.columns, vocabulary))
    # The last block may reach the context's end; a draft that ends earlier than the target would stop helping there.
    capacity = cache_positions(context)
    part.prepare(capacity)
    cache = part.make_cache(slots=slots, capacity=capacity)
    static = make_static(part, cache, path, max_rows=limits.PREFILL_CHUNK_ROWS, is_draft=True)
    return ModelDrafter(part, cache, vocabulary) if static is None else GraphDrafter(static, vocabulary)


def check_same_tokenizer(target: Path | str, draft: Path | str) -> int:
    """The highest token id and one. Token ids must mean the same text in both models; sizes of the embeddings may
    differ by padding.

    Raises:
        DraftMismatch: with the first difference.
    """
    ours, theirs = Tokenizer.load(target).token_map(), Tokenizer.load(draft).token_map()
    if ours == theirs:
        return max(ours.values()) + 1
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]
    raise DraftMismatch(
        f"the draft model's tokenizer is not the target's: they differ at token {different[1]} "
        f"({different[0]!r}); choose a draft of the same family"
    )
