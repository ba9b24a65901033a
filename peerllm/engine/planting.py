"""Planted models without files: the weights are made on the device when a peer loads, in a second instead of minutes.

`python -m peerllm.engine.planting FOLDER --shape qwen2.5-7b --draft-shape qwen2.5-0.5b --agree 0.90,0.80,0.68` writes
two folders that hold a configuration, a tokenizer and a recipe, and prints where the answers begin. The index names a
weight file that is not there, so nothing but this module can load them. The vocabulary is cut into a region for each
agreement, and the last letter of a prompt chooses where the answer begins: one draft, loaded once, agrees with the
target at all these rates. In place of a rate a recorded trace may stand, `t1101…`: whether a draft was right at each
place of an answer after its first token, again and again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peerllm.engine import planted
from peerllm.engine.codec import DTYPES
from peerllm.models import ModelDescription
from peerllm.models.cache import sha256_of
from peerllm.models.checkpoint import INDEX_FILE, read_json
from peerllm.models.layout import all_tensors
from peerllm.protocol.errors import ModelError

if TYPE_CHECKING:
    # Bring transformers, which takes seconds; whether a folder is planted is asked before any layer is built.
    from peerllm.engine.slice import ModelSlice

RECIPE = "planted.json"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The n-th, as the last of a prompt, leads to the n-th start."""
STARTS = 3
"""In each region, a third of it apart."""
TARGET, DRAFT = "planted-target", "planted-draft"
_ABSENT = "planted.safetensors"
_BLOCK = 50
"""Tokens among which disagreements are drawn in just their number: an answer of 64 tokens meets the rate too."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a planted model's weights are made from.

    Args:
        vocabulary: tokens that the tokenizer knows; rows of the head beyond it are padding.
        starts: tokens to which the first of `LETTERS` lead.
        agreements: of a draft, one for each region of the vocabulary, a rate or a trace; none for a target.
    """

    seed: int
    vocabulary: int
    starts: tuple[int, ...] = ()
    agreements: tuple[float | str, ...] = ()

    def follows(self) -> list[int]:
        """What the model says after each token."""
        wrong: set[int] = set()
        for region, agreement in zip(regions(self.vocabulary, len(self.agreements)), self.agreements, strict=True):
            if isinstance(agreement, str):
                wrong |= traced_in(region, agreement, self.vocabulary)
            else:
                wrong |= spread_disagreements(region, agreement, self.seed)
        follows = planted.follows(self.vocabulary, wrong)
        letters = planted.alphabet()
        for letter, start in zip(LETTERS, self.starts, strict=False):
            follows[self.vocabulary - len(letters) + letters.index(letter)] = start
        return follows


def regions(vocabulary: int, count: int) -> list[range]:
    """The words of the vocabulary in `count` equal parts; an answer that begins in one stays there for a while."""
    if not count:
        return []
    first, size = planted.RESERVED, (vocabulary - planted.RESERVED - planted.ALPHABET) // count
    return [range(first + index * size, first + (index + 1) * size) for index in range(count)]


def starts_in(region: range) -> list[int]:
    """Where the answers in `region` begin."""
    return [region.start + index * len(region) // STARTS for index in range(STARTS)]


def traced_in(region: range, trace: str, vocabulary: int) -> set[int]:
    """Tokens of `region` after which a draft with that trace is wrong: it begins anew at each start."""
    starts = starts_in(region)
    found: set[int] = set()
    for start, end in zip(starts, [*starts[1:], region.stop], strict=True):
        places = itertools.islice(itertools.cycle(each == "1" for each in trace[1:]), end - start)
        found |= planted.traced_disagreements(start, places, vocabulary)
    return found


def parse_agreement(words: str) -> float | str:
    """A rate from 0 to 1, or a trace. Raises ValueError."""
    if re.fullmatch("t[01]{1,4096}", words):
        return words
    value = float(words)
    if not 0.0 <= value <= 1.0:
        raise ValueError("a share is from 0 to 1")
    return value


def spread_disagreements(region: range, agreement: float, seed: int) -> set[int]:
    """Tokens of `region` after which a draft is wrong: chosen at random, and the same share of every 50 in a row."""
    chance = random.Random(f"{seed} {region.start}")
    found: set[int] = set()
    owed = 0.0
    for start in range(region.start, region.stop, _BLOCK):
        block = range(start, min(start + _BLOCK, region.stop))
        owed += len(block) * (1.0 - agreement)
        count = min(round(owed), len(block))
        owed -= count
        found.update(chance.sample(block, count))
    return found


def write_recipe(folder: Path, config: Any, recipe: Recipe, dtype: str) -> Path:
    """A folder that `load_weights` plants."""
    shape = planted.write_config(folder, config, dtype)
    planted.write_tokenizer(folder, recipe.vocabulary)
    index = {"metadata": {}, "weight_map": dict.fromkeys(all_tensors(shape), _ABSENT)}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / RECIPE).write_text(json.dumps(asdict(recipe)))
    return folder


def is_planted(folder: Path | str) -> bool:
    return (Path(folder) / RECIPE).is_file()


def read_recipe(folder: Path | str) -> Recipe:
    """Raises ModelError where the recipe is none."""
    value = read_json(Path(folder) / RECIPE)
    try:
        starts = tuple(int(each) for each in value["starts"])
        agreements = tuple(parse_agreement(str(each)) for each in value["agreements"])
        return Recipe(int(value["seed"]), int(value["vocabulary"]), starts, agreements)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}: {RECIPE} is not a recipe: {error!r}") from error


def as_whole(found: ModelDescription) -> ModelDescription:
    """The description of a planted folder: nothing is to be downloaded, and its identity is its recipe's. Others as
    they are."""
    if found.folder is None or not is_planted(found.folder):
        return found
    digest = sha256_of(Path(found.folder) / RECIPE)
    return replace(found, download_bytes=0, identity=replace(found.identity, files={RECIPE: digest}))


def plant(
    part: ModelSlice,
    members: Mapping[str, str],
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Makes the parameters `members` (name in `part` to tensor name) on `device`.

    A layer's weights depend on its number alone, not on who holds it. Generators of one kind of device agree with each
    other: both peers have to be on the same kind.
    """

    def drawn(size: Collection[int], std: float, *what: object) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(random.Random(f"{recipe.seed} {what}").getrandbits(63))
        return torch.empty(tuple(size), dtype=dtype, device=device).normal_(std=std, generator=generator)

    for name, tensor in members.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = part.get_submodule(owner_name)
        size = owner.get_parameter(attribute).shape
        if name == "norm.weight":
            values = torch.ones(size, dtype=dtype, device=device)
        elif name == "embed.weight":
            values = drawn(size, 1.0, "embedding")
        elif name == "head.weight":
            values = drawn(size, planted.STD, "head")
            follows = torch.tensor(recipe.follows(), device=device)
            embedding = drawn(size, 1.0, "embedding")
            values.index_add_(0, follows, embedding[: len(follows)].mul_(planted.STD))
        else:
            values = drawn(size, planted.std_of(name), tensor)
            if name.endswith("norm.weight"):
                values += 1.0
        setattr(owner, attribute, torch.nn.Parameter(values, requires_grad=False))


def write_pair(
    folder: Path, shape: str, draft_shape: str, agreements: tuple[float | str, ...], dtype: str, seed: int = 0
) -> dict[str, Any]:
    """Target and draft in `folder`.

    Returns:
        the two folders, the target's `layers`, and `starts`: for each agreement the letters and the tokens to which
        they lead.
    """
    from peerllm.engine.shapes import named_config

    target, draft = named_config(shape), named_config(draft_shape)
    # Token ids have to mean the same in both, and a token that one lacks is in neither.
    vocabulary = min(target.vocab_size, draft.vocab_size)
    places = regions(vocabulary, len(agreements))
    starts = tuple(start for place in places for start in starts_in(place))
    paths = {"target": folder / TARGET, "draft": folder / DRAFT}
    write_recipe(paths["target"], target, Recipe(seed, vocabulary, starts), dtype)
    write_recipe(paths["draft"], draft, Recipe(seed + 1, vocabulary, starts, agreements), dtype)
    lead = list(zip(LETTERS, starts, strict=False))
    begin = [lead[first : first + STARTS] for first in range(0, len(lead), STARTS)]
    return {name: str(path) for name, path in paths.items()} | {"layers": target.num_hidden_layers, "starts": begin}


def main(arguments: list[str] | None = None) -> None:
    from peerllm.engine.shapes import NAMES

    parser = argparse.ArgumentParser(prog="python -m peerllm.engine.planting", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", required=True, choices=NAMES)
    parser.add_argument("--draft-shape", required=True, choices=NAMES)
    parser.add_argument("--agree", required=True, help="shares of tokens after which the draft is right: 0.9,0.8")
    parser.add_argument("--dtype", default="float16", choices=tuple(DTYPES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        agreements = tuple(parse_agreement(each) for each in options.agree.split(","))
    except ValueError as error:
        parser.error(f"--agree: {error}")
    if len(agreements) * STARTS > len(LETTERS):
        parser.error(f"--agree: at most {len(LETTERS) // STARTS} rates")
    written = write_pair(options.folder, options.shape, options.draft_shape, agreements, options.dtype, options.seed)
    print(json.dumps(written), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
