"""Model identity: what two peers compare before either loads a byte, and the division of layers between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import LayersMismatch
from peerllm.protocol.fields import checked, from_map, text, text_check, uint

_HEX = 64
UNQUANTISED, INT8 = "unquantised", "int8"
"""What a peer runs its layers' weights as."""


def _sha256_map(value: Any) -> dict[str, str]:
    one = text_check(_HEX)
    if type(value) is not dict or len(value) > limits.MAX_LIST_ITEMS:
        raise ValueError(f"not a map of at most {limits.MAX_LIST_ITEMS} files")
    return {text_check(limits.MAX_NAME_CHARS)(name): one(digest) for name, digest in value.items()}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes two copies of a model the same model.

    Hashes are lower-case hexadecimal sha256. `files` maps each weight file to its sha256: from the hub's metadata, or
    hashed once and cached; a peer that holds a part leaves the others out, and what both know is compared.
    """

    config: str = text(_HEX)
    """Of the config fields that change the result, as canonical JSON (`models.identity` lists them)."""
    vocabulary: str = text(_HEX)
    """Of the map of token ids."""
    tensors: str = text(_HEX)
    """Of the sorted (tensor, dtype, shape)."""
    layers: int = uint(limits.MAX_LAYERS, minimum=1)
    """Decoder layers in the whole model."""
    weights: str = text(limits.MAX_NAME_CHARS, default=UNQUANTISED)
    """What this peer runs them as; peers may differ, and each says so."""
    files: Mapping[str, str] = checked(_sha256_map, default_factory=dict)

    def differences(self, other: ModelIdentity) -> list[str]:
        """What differs, in words; empty when both are the same model. `weights` may differ and is not compared."""
        names = {
            "config": "the model's configuration",
            "vocabulary": "the tokenizer's vocabulary",
            "tensors": "the tensors' names, dtypes or shapes",
            "layers": "the number of layers",
        }
        found = [words for name, words in names.items() if getattr(self, name) != getattr(other, name)]
        shared = self.files.keys() & other.files.keys()
        changed = sorted(name for name in shared if self.files[name] != other.files[name])
        if changed:
            found.append("the weights in " + ", ".join(changed[:3]) + (" and others" if len(changed) > 3 else ""))
        return found


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers `[first, last)` of the target model."""

    first: int = uint(limits.MAX_LAYERS)
    last: int = uint(limits.MAX_LAYERS)

    @classmethod
    def parse(cls, words: str) -> LayerRange:
        """From `a:b` as a user types it. Raises LayersMismatch in words."""
        first, colon, last = words.partition(":")
        if not colon or not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in (first, last)):
            raise LayersMismatch(f"layers are written as first:last, such as 0:15; got {words!r}")
        return from_map(cls, {"first": int(first), "last": int(last)})

    def __len__(self) -> int:
        return max(0, self.last - self.first)

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def check_chain(ranges: list[LayerRange], layers: int) -> None:
    """Ranges, in order of the chain, cover `[0, layers)` exactly.

    Raises:
        LayersMismatch: with the overlap, the gap or the empty range in words.
    """
    expected = 0
    for each in ranges:
        if each.last > layers:
            raise LayersMismatch(f"layers {each} reach beyond the model, which has {layers} layers")
        if len(each) == 0:
            raise LayersMismatch(f"layers {each} are empty; every peer has to hold at least one layer")
        if each.first < expected:
            raise LayersMismatch(f"layers {each.first}:{min(expected, each.last)} are held twice")
        if each.first > expected:
            raise LayersMismatch(f"layers {expected}:{each.first} are held by nobody")
        expected = each.last
    if expected != layers:
        raise LayersMismatch(f"layers {expected}:{layers} are held by nobody")


def share_layers(layers: int, wanted: list[LayerRange | None], free_bytes: list[int]) -> list[LayerRange]:
    """The division for a chain of peers: named ranges stay, the rest is shared by free memory.

    With two peers, one named range settles the other. At least one layer each.

    Raises:
        LayersMismatch: the named ranges overlap, leave a gap, or leave nothing for a peer.
    """
    if len(wanted) == 2 and wanted.count(None) == 1:
        named = wanted[0] or wanted[1]
        if named is not None:
            other = LayerRange(named.last, layers) if wanted[1] is None else LayerRange(0, named.first)
            chain = [named, other] if wanted[1] is None else [other, named]
            check_chain(chain, layers)
            return chain
    if all(each is not None for each in wanted):
        chain = [each for each in wanted if each is not None]
        check_chain(chain, layers)
        return chain
    if any(each is not None for each in wanted):
        raise LayersMismatch("either every peer of a longer chain names its layers, or none does")
    if layers < len(wanted):
        raise LayersMismatch(f"{layers} layers cannot be shared by {len(wanted)} peers")
    total = sum(free_bytes) or len(free_bytes)
    weights = free_bytes if sum(free_bytes) else [1] * len(free_bytes)
    chain, first, passed = [], 0, 0
    for index, weight in enumerate(weights):
        passed += weight
        left = len(weights) - index - 1
        last = min(max(round(layers * passed / total), first + 1), layers - left)
        chain.append(LayerRange(first, last))
        first = last
    check_chain(chain, layers)
    return chain
