"""One peer's part of a model: layers `[first, last)`, the embedding before layer 0, norm and head after the last.

The modules are transformers' own, built on the meta device from the configuration and filled from safetensors with
this part's weights alone. Everything around them is ours: cache, mask, positions, rotary tables.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from peerllm.engine import attention
from peerllm.engine.cache import CacheView, KvCache
from peerllm.models.allowlist import check_folder
from peerllm.protocol.errors import LayersMismatch, ModelUnsupported
from peerllm.protocol.identity import LayerRange

_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
"""model_type to the prefix of its classes in transformers. A type that is not here is refused before loading."""


@dataclass(frozen=True, slots=True)
class SliceShape:
    """What caches and buffers need to know of a model's configuration."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    max_positions: int

    @classmethod
    def of(cls, config: Any) -> SliceShape:
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            is_tied=bool(config.tie_word_embeddings),
            max_positions=config.max_position_embeddings,
        )


def read_config(folder: Path | str) -> Any:
    """transformers' configuration of the model in `folder`; no code of the model's is ever run.

    Raises:
        ModelError: no model there, or one that this engine has no tests for, with the reason.
    """
    check_folder(Path(folder))
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)


class ModelSlice(nn.Module):
    """Layers `[first, last)` of the model that `config` describes, on the meta device until weights are loaded.

    Args:
        is_embedding_apart: the embedding, of a slice that has one, is in the host's memory, and the layers are given
            its rows.

    Raises:
        LayersMismatch: the range is not within the model.
        ModelUnsupported: the model's family is not known.
    """

    def __init__(self, config: Any, layers: LayerRange, *, is_embedding_apart: bool = False) -> None:
        super().__init__()
        if config.model_type not in _FAMILIES:
            raise ModelUnsupported(f"models of type {config.model_type!r} are not supported")
        if not 0 <= layers.first < layers.last <= config.num_hidden_layers:
            raise LayersMismatch(f"layers {layers} are not layers of a model that has {config.num_hidden_layers}")
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = attention.NAME
        self.shape = SliceShape.of(config)
        self.range = layers
        self.is_first = layers.first == 0
        self.is_last = layers.last == config.num_hidden_layers
        self.takes_tokens = self.is_first and not is_embedding_apart
        """Whether `forward` is given tokens; hidden states otherwise."""
        family = _FAMILIES[config.model_type]
        modeling = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
        layer_class = getattr(modeling, f"{family}DecoderLayer")
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if self.is_first else None
            # Layer indexes address our cache, which holds this part's layers alone: they begin at 0.
            self.layers = nn.ModuleList(layer_class(self.config, index) for index in range(len(layers)))
            self.norm = (
                getattr(modeling, f"{family}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
                if self.is_last
                else None
            )
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if self.is_last else None
        if self.embed is not None and self.head is not None and self.shape.is_tied:
            self.head.weight = self.embed.weight
        self.head_tokens: torch.Tensor | None = None
        """int64 `[rows of the head]`: their token ids, where some are chosen; None: row i is token i."""
        self._bytes_besides = 0
        """Held, and not among the parameters' sizes."""
        self._rotary = getattr(modeling, f"{family}RotaryEmbedding")(config=self.config)
        self._rotary_table: tuple[torch.Tensor, torch.Tensor] | None = None
        # 5.24 renamed the layers' `past_key_values` to `cache` and warns about the old name.
        names = inspect.signature(layer_class.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self.requires_grad_(False)
        self.eval()

    def weight_map(self) -> dict[str, str]:
        """This module's parameters and the checkpoint's tensors that they are read from. A tied head is read from the
        embedding's tensor; on a slice that has both, the parameter is one."""
        names: dict[str, str] = {}
        for name, _ in self.named_parameters(remove_duplicate=False):
            module, _, rest = name.partition(".")
            if module == "layers":
                index, _, tail = rest.partition(".")
                names[name] = f"model.layers.{self.range.first + int(index)}.{tail}"
            elif module == "embed":
                names[name] = "model.embed_tokens.weight"
            elif module == "norm":
                names[name] = "model.norm.weight"
            else:
                names[name] = "model.embed_tokens.weight" if self.shape.is_tied else "lm_head.weight"
        return names

    @property
    def columns(self) -> int:
        """Rows of the head, and so columns of its logits. The embedding has `shape.vocabulary`."""
        if self.head is None:
            raise RuntimeError("only the last slice has a head")
        return self.head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Of the layers."""
        norm: Any = self.layers[0].input_layernorm
        device: torch.device = norm.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states; weights may be int8."""
        norm: Any = self.layers[0].input_layernorm
        return norm.weight.dtype

    @property
    def byte_count(self) -> int:
        """On the layers' device."""
        here = (each for each in self.parameters() if each.device == self.device)
        return sum(each.numel() * each.element_size() for each in here) + self._bytes_besides

    def cut_head(self, rows: int) -> None:
        """Leaves the head its first `rows` rows, a view: what it shares with the embedding stays whole, and nothing is
        freed. Once, after the weights are there."""
        if self.head is None:
            raise RuntimeError("only the last slice has a head")
        held = self.byte_count
        self.head.weight = nn.Parameter(self.head.weight.data[:rows], requires_grad=False)
        self.head.out_features = rows
        self._bytes_besides += held - self.byte_count

    def prepare(self, positions: int) -> None:
        """Computes the rotary tables for so many positions; once, after the weights are there."""
        rotary = self._rotary.to(self.device)
        index = torch.arange(positions, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = rotary(like, index)
        self._rotary_table = cos[0].contiguous(), sin[0].contiguous()

    @property
    def rotary_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[positions, head_dim]` in the model's dtype."""
        if self._rotary_table is None:
            raise RuntimeError("prepare() comes before the first forward")
        return self._rotary_table

    def make_cache(self, *, slots: int, capacity: int) -> KvCache:
        return KvCache(
            layers=len(self.range),
            slots=slots,
            heads=self.shape.kv_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, inputs: torch.Tensor, view: CacheView) -> torch.Tensor:
        """Hidden states `[batch, rows, width]` after this part's layers, before the final norm.

        Args:
            inputs: token ids `[batch, rows]` where the slice takes tokens, else hidden states `[batch, rows, width]`.
            view: where the rows stand; their keys and values are written. The cache is not advanced. A `mask` of None
                is for rows that see all rows before them and nothing else.
        """
        hidden = self.embed(inputs) if self.takes_tokens and self.embed is not None else inputs
        cos, sin = self.rotary_table
        rotary = cos[view.positions], sin[view.positions]
        for layer in self.layers:
            out = layer(
                hidden,
                attention_mask=view.mask,
                position_ids=view.positions,
                position_embeddings=rotary,
                has_stale_keys=view.has_stale_keys,
                **{self._cache_argument: view},
            )
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def inputs_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """On the device what `forward` takes for `tokens`: themselves `[rows]`, or their embedding `[rows, width]`."""
        if self.embed is None:
            raise RuntimeError("only the first slice has an embedding")
        if self.takes_tokens:
            return torch.tensor(list(tokens), dtype=torch.int64, device=self.device)
        found: torch.Tensor = self.embed(torch.tensor(list(tokens), dtype=torch.int64))
        return found.to(self.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., vocabulary]` in the model's dtype, from hidden states that `forward` of the last slice gave."""
        if self.norm is None or self.head is None:
            raise RuntimeError("only the last slice has a head")
        return self.head(self.norm(hidden))
