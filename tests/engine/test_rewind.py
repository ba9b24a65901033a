"""Rewinding by position, and stale rows that nothing may read. Logits are compared: acceptance shows no such fault."""

from __future__ import annotations

import random

import pytest
import torch

from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import load_weights
from peerllm.protocol.identity import LayerRange

TOLERANCE = 1e-3


def _part(folder, first=0, last=4):
    part = ModelSlice(read_config(folder), LayerRange(first, last))
    load_weights(part, folder, torch.float32, "cpu", lambda stage, fraction: None)
    part.prepare(256)
    return part


def _poison(cache):
    """Everything at or past each slot's position becomes what no forward survives if it reads it."""
    for slot, length in enumerate(cache.lengths):
        cache.keys[:, slot, :, length:] = float("nan")
        cache.values[:, slot, :, length:] = 1e30


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_after_any_of_1000_rewinds_logits_are_those_of_a_fresh_forward(tiny, family):
    model = tiny(family)
    part = _part(model.folder)
    cache = part.make_cache(slots=2, capacity=128)
    rng = random.Random(3)
    tokens: list[int] = []
    worst = 0.0
    for _ in range(500):
        length = rng.randint(max(0, len(tokens) - 12), len(tokens))
        cache.rewind(1, length)
        if length > 50:
            length = rng.randrange(20)
            cache.rewind(1, length)
        _poison(cache)
        block = [rng.randrange(300) for _ in range(rng.choice([1, 1, 2, 5, 9]))]
        tokens = tokens[:length] + block
        logits = part.logits(part(torch.tensor([block]), cache.view([1], len(block))))[0]
        cache.advance([1], len(block))
        expected = model.whole(torch.tensor([tokens])).logits[0, length:]
        worst = max(worst, float((logits - expected).abs().max()))
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)) or worst < TOLERANCE
    print(f"{family}: largest difference of a logit over 500 rewinds {worst:.1e}")
    assert worst < TOLERANCE


@torch.inference_mode()
def test_stale_rows_of_a_ragged_batch_change_nothing(tiny):
    model = tiny("llama")
    part = _part(model.folder)
    cache = part.make_cache(slots=3, capacity=64)
    rng = random.Random(5)
    texts = {slot: [rng.randrange(300) for _ in range(length)] for slot, length in ((0, 23), (1, 1), (2, 9))}
    for slot, text in texts.items():
        part(torch.tensor([text]), cache.view([slot], len(text)))
        cache.advance([slot], len(text))
    _poison(cache)
    blocks = [[rng.randrange(300) for _ in range(3)] for _ in texts]
    logits = part.logits(part(torch.tensor(blocks), cache.view([0, 1, 2], 3)))
    for slot, text in texts.items():
        expected = model.whole(torch.tensor([text + blocks[slot]])).logits[0, -3:]
        assert float((logits[slot] - expected).abs().max()) < TOLERANCE


@torch.inference_mode()
def test_a_slice_in_parts_is_the_whole(tiny):
    """Layer indexes are rebased, the tied head is there at both ends, norms and biases are loaded."""
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        model = tiny(family)
        tokens = torch.tensor([model.prompts[7]])
        hidden = tokens
        for first, last in ((0, 1), (1, 3), (3, 4)):
            part = _part(model.folder, first, last)
            hidden = part(hidden, part.make_cache(slots=1, capacity=64).view([0], tokens.shape[1]))
        difference = (part.logits(hidden) - model.whole(tokens).logits).abs().max()
        assert float(difference) < TOLERANCE, family


def test_a_slice_holds_its_own_weights_and_no_others(tiny):
    model = tiny("qwen2")
    first, last = _part(model.folder, 0, 1), _part(model.folder, 1, 4)
    names = set(first.weight_map().values())
    assert "model.embed_tokens.weight" in names
    assert not any(name.startswith("model.layers.1.") for name in names)
    assert last.weight_map()["head.weight"] == "model.embed_tokens.weight"
    assert last.weight_map()["layers.0.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    whole = sum(each.numel() for each in model.whole.parameters()) * 4
    assert first.byte_count + last.byte_count == whole + 304 * 64 * 4
