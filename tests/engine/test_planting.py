"""Planted models without weight files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peerllm import models
from peerllm.engine import planted, planting
from peerllm.engine.int8 import is_quantised
from peerllm.engine.operations import Operations
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import load_weights
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import ModelError
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests.engine.pairs import Pair

SHAPE = "qwen2.5-tiny"
RATES = (0.9, 0.7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return planting.write_pair(tmp_path_factory.mktemp("planting"), SHAPE, SHAPE, RATES, "float32")


def _slice(folder, first, last, **options):
    part = ModelSlice(read_config(folder), LayerRange(first, last))
    load_weights(part, folder, torch.float32, "cpu", lambda *_: None, **options)
    return part


@pytest.mark.parametrize("weights", ["unquantised", "int8"])
def test_the_last_letter_of_the_prompt_chooses_the_answer_and_how_often_the_draft_is_right(pair, weights):
    engines = Pair.load(pair["target"], context=256, draft=f"model:{pair['draft']}", weights=weights)
    tokenizer = Tokenizer.load(pair["target"])
    for rate, ((letter, first), *_) in zip(RATES, pair["starts"], strict=True):
        run = engines.generate(tokenizer.encode_prompt(f"Begin at {letter}"), 150, 1)
        assert run.tokens == list(range(first, first + 150))
        assert run.accepted / run.drafted == pytest.approx(rate, abs=0.06)


def test_a_recorded_trace_says_at_which_places_the_draft_is_right(tmp_path):
    trace = "t1101101110010"
    pair = planting.write_pair(tmp_path, SHAPE, SHAPE, (0.9, trace), "float32")
    engines = Pair.load(pair["target"], context=256, draft=f"model:{pair['draft']}")
    tokenizer = Tokenizer.load(pair["target"])
    for letter, first in pair["starts"][1]:
        prompt = [*tokenizer.encode_prompt(f"Begin at {letter}"), first]
        engines.open(1, Sampling(), prompt)
        known, tokens, agreed = 0, list(prompt), []
        for _ in range(2 * len(trace)):
            block = engines.first.draft_block(1, known, tokens[known:], 1)
            agreed.append(engines.last.verify(1, block.start, block.candidates, block.payload).accepted)
            known, tokens = len(tokens), [*tokens, tokens[-1] + 1]
        assert "".join(map(str, agreed)) == (trace[1:] * 3)[: 2 * len(trace)]
    for bad in ("t", "t12", "2.0", "x"):
        with pytest.raises(ValueError):
            planting.parse_agreement(bad)


def test_every_50_tokens_of_a_region_hold_the_same_share_of_disagreements():
    region = range(8, 1508)
    wrong = planting.spread_disagreements(region, 0.68, seed=3)
    assert {sum(token in wrong for token in range(start, start + 50)) for start in region[::50]} == {16}
    assert wrong != planting.spread_disagreements(region, 0.68, seed=4)


def test_a_layers_weights_do_not_depend_on_who_holds_it(pair):
    whole, late = _slice(pair["target"], 0, 4), _slice(pair["target"], 2, 4)
    for name in ("mlp.gate_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight"):
        assert torch.equal(whole.layers[3].get_parameter(name), late.layers[1].get_parameter(name))
        assert not torch.equal(whole.layers[2].get_parameter(name), late.layers[1].get_parameter(name))
    assert torch.equal(whole.head.weight, late.head.weight)


def test_int8_is_made_of_planted_weights_too(pair):
    assert is_quantised(_slice(pair["target"], 1, 2, weights="int8"))


def test_a_planted_folder_is_described_as_whole_and_by_its_recipe(pair):
    operations = Operations(threads=1, progress=lambda *_: None)
    found, _ = operations.perform("describe", {"model": pair["target"]}, b"")
    assert (found["download_bytes"], found["layers"]) == (0, 4)
    other, _ = operations.perform("describe", {"model": pair["draft"]}, b"")
    assert found["identity"]["files"] != other["identity"]["files"]


def test_no_folder_without_a_recipe_is_planted(pair, tmp_path):
    for path in Path(pair["target"]).iterdir():
        if path.name != planting.RECIPE:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert models.describe(str(tmp_path)).download_bytes > 0
    with pytest.raises(ModelError, match=r"planted\.safetensors is not there"):
        _slice(tmp_path, 0, 1)
    (tmp_path / planting.RECIPE).write_text(json.dumps({"seed": 1}))
    with pytest.raises(ModelError, match="not a recipe"):
        _slice(tmp_path, 0, 1)


def test_tokens_that_only_the_larger_head_has_are_in_neither_vocabulary(tmp_path):
    from peerllm.engine.shapes import named_config

    config = named_config(SHAPE)
    config.vocab_size += 64
    recipe = planting.Recipe(0, config.vocab_size - 64, (20,))
    folder = planting.write_recipe(tmp_path, config, recipe, "float32")
    engines = Pair.load(folder, context=128)
    letter = Tokenizer.load(folder).encode_prompt("A")
    assert letter[0] < config.vocab_size - 64
    assert engines.generate(letter, 20, 0).tokens == list(range(20, 40))
    assert max(recipe.follows()) < config.vocab_size - 64 and len(planted.alphabet()) == planted.ALPHABET
