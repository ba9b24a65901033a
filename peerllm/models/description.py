"""What is known of a model before it is loaded: enough to agree with another peer and to share the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerllm.models.allowlist import ModelShape, check_folder
from peerllm.models.cache import Progress, no_progress
from peerllm.models.checkpoint import Checkpoint
from peerllm.models.identity import folder_identity, main_dtype
from peerllm.models.layout import EMBEDDING, NORM, all_tensors, head_tensor, layer_tensors, size_bytes
from peerllm.protocol import limits
from peerllm.protocol.fields import choice, flag, from_map, nested, optional, text, to_map, uint
from peerllm.protocol.identity import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Bytes are of the weights in the checkpoint's dtype."""

    name: str = text(limits.MAX_NAME_CHARS)
    source: str | None = optional(text(limits.MAX_NAME_CHARS))
    """Hub id or the embedded model's name: what another machine can find it by. None: a folder of the user's own."""
    revision: str | None = optional(text(limits.MAX_NAME_CHARS))
    """The commit on the hub."""
    folder: str | None = optional(text(limits.MAX_TEXT_CHARS))
    """On this machine; of a hub model, what is here of it."""
    identity: ModelIdentity = nested(ModelIdentity)
    family: str = text(limits.MAX_NAME_CHARS)
    layers: int = uint(limits.MAX_LAYERS, minimum=1)
    hidden_size: int = uint(limits.MAX_WIDTH, minimum=1)
    kv_width: int = uint(limits.MAX_WIDTH, minimum=1)
    """Elements that one position adds to one layer's keys, and again to its values."""
    vocabulary: int = uint(limits.MAX_VOCABULARY, minimum=1)
    """Rows of the embedding, padding included."""
    max_context: int = uint(limits.MAX_CONTEXT, minimum=1)
    dtype: str = choice(("float64", "float32", "float16", "bfloat16"))
    """What most of the checkpoint's weights are."""
    layer_bytes: int = uint()
    """Of one decoder layer; all are alike."""
    embedding_bytes: int = uint()
    head_bytes: int = uint()
    """Final norm and head. A tied head is counted here as well: at the other end it is loaded again."""
    tied: bool = flag()
    download_bytes: int = uint(default=0)
    """Weights of the whole model that are not on this machine."""

    @classmethod
    def from_map(cls, value: Any) -> ModelDescription:
        """Raises ProtocolError that names the field."""
        return from_map(cls, value)

    def to_map(self) -> dict[str, Any]:
        return to_map(self)

    def range_bytes(self, first: int, last: int) -> int:
        """Weights that the peer with layers `[first, last)` holds; a tied embedding counts once where both ends are."""
        edges = (self.embedding_bytes if first == 0 else 0) + (self.head_bytes if last == self.layers else 0)
        if self.tied and first == 0 and last == self.layers:
            edges -= self.embedding_bytes
        return (last - first) * self.layer_bytes + edges


def description_of(
    shape: ModelShape,
    identity: ModelIdentity,
    dtypes: Mapping[str, str],
    *,
    name: str,
    source: str | None,
    revision: str | None,
    folder: Path | None,
    download_bytes: int,
) -> ModelDescription:
    tensors = all_tensors(shape)

    def total(names: list[str]) -> int:
        return sum(size_bytes({each: tensors[each]}, dtypes[each]) for each in names)

    return ModelDescription(
        name=name[: limits.MAX_NAME_CHARS],
        source=source,
        revision=revision,
        folder=None if folder is None else str(folder),
        identity=identity,
        family=shape.family,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        kv_width=shape.kv_heads * shape.head_dim,
        vocabulary=shape.vocabulary,
        max_context=shape.max_context,
        dtype=main_dtype(dtypes),
        layer_bytes=max(total(list(layer_tensors(shape, layer))) for layer in range(shape.layers)),
        embedding_bytes=total([EMBEDDING]),
        head_bytes=total([NORM, head_tensor(shape)]),
        tied=shape.tied,
        download_bytes=download_bytes,
    )


def describe_folder(
    folder: Path,
    *,
    name: str | None = None,
    source: str | None = None,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> ModelDescription:
    """A local folder, whole or with some of its weight files absent; `download_bytes` are those files' tensors.

    Raises:
        ModelNotFound: no model there.
        ModelUnsupported: refused, with the reason.
        ModelError: its parts do not belong together, or are damaged.
    """
    shape = check_folder(folder)
    checkpoint = Checkpoint.open(folder)
    identity, dtypes = folder_identity(folder, shape, checkpoint, progress)
    here = checkpoint.names()
    absent = {tensor: size for tensor, size in all_tensors(shape).items() if tensor not in here}
    return description_of(
        shape,
        identity,
        dtypes,
        name=name or folder.resolve().name,
        source=source,
        revision=revision,
        folder=folder,
        download_bytes=sum(size_bytes({tensor: size}, dtypes[tensor]) for tensor, size in absent.items()),
    )
