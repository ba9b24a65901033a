"""The memory plan: what a slice takes, said before it is loaded."""

from __future__ import annotations

import json

import pytest

from peerllm.engine import memory
from peerllm.engine.engine import Engine
from peerllm.engine.shapes import named_config
from peerllm.protocol.errors import NotEnoughMemory
from peerllm.protocol.identity import LayerRange

GIB = 1 << 30
CARD = 8 * GIB - 400 * (1 << 20)
"""What a card of 8 GB has free with a desktop on it."""


def _folder(path, name):
    """A folder with a config and an empty weight file: a plan reads neither weights nor tokenizer."""
    path.mkdir()
    config = named_config(name).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def qwen(tmp_path):
    return _folder(tmp_path / "7b", "qwen2.5-7b"), _folder(tmp_path / "draft", "qwen2.5-0.5b")


def _plan(folder, layers, **options):
    defaults = {"dtype": "float16", "weights": "unquantised", "context": 4096, "slots": 1, "free": 0, "is_gpu": True}
    return memory.plan_slice(folder, layers, **{**defaults, **options})


def test_half_of_7b_the_draft_and_4k_of_context_take_under_9_5_gb(qwen):
    target, draft = qwen
    drafts = memory.plan_draft(draft, dtype="float16", context=4096, slots=1, is_gpu=True)
    plan = _plan(target, LayerRange(0, 14), draft=drafts)
    print(plan.words())
    assert plan.total < 9.5e9


def test_with_int8_weights_an_8_gb_card_holds_them(qwen):
    target, draft = qwen
    drafts = memory.plan_draft(draft, dtype="float16", context=4096, slots=1, is_gpu=True)
    assert not _plan(target, LayerRange(0, 14), draft=drafts, free=CARD).fits
    assert _plan(target, LayerRange(0, 14), draft=drafts, free=CARD, weights="int8").fits
    assert _plan(target, LayerRange(14, 28), free=CARD, weights="int8").fits


def test_the_plan_of_weights_and_cache_is_what_an_engine_then_holds(tiny):
    folder = tiny("qwen2").folder
    for layers, weights in ((LayerRange(0, 2), "unquantised"), (LayerRange(1, 4), "int8")):
        engine = Engine.load(folder, layers, context=100, weights=weights)
        plan = _plan(folder, layers, dtype="float32", weights=weights, context=100, slots=4, is_gpu=False)
        assert plan.weights == engine.loaded.bytes["weights"]
        rotary = sum(each.nbytes for each in engine.part.rotary_table)
        assert engine.loaded.bytes["cache"] + rotary <= plan.cache <= 1.01 * (engine.loaded.bytes["cache"] + rotary)


def test_the_largest_context_is_the_largest_that_fits(qwen):
    plan = _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB)
    largest = plan.largest_context()
    assert _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB, context=largest).fits
    assert not _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB, context=largest + 1).fits


def test_what_does_not_fit_is_refused_with_the_numbers_before_anything_is_read(tiny, monkeypatch):
    folder = tiny("llama").folder
    needed = _plan(folder, LayerRange(0, 4), dtype="float32", context=512, is_gpu=False).total
    monkeypatch.setattr(memory, "host_memory", lambda: (needed - 1, 1 << 40))
    monkeypatch.setattr("peerllm.engine.engine.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"MiB are needed .* MiB are free; a context of \d+ would fit"):
        Engine.load(folder, LayerRange(0, 4), context=512)
    monkeypatch.setattr(memory, "host_memory", lambda: (needed // 2, 1 << 40))
    with pytest.raises(NotEnoughMemory, match="fewer layers"):
        Engine.load(folder, LayerRange(0, 4), context=512)


def test_without_a_wish_the_context_is_what_fits(tiny, monkeypatch):
    folder = tiny("llama").folder
    needed = _plan(folder, LayerRange(0, 4), dtype="float32", context=300, is_gpu=False).total
    monkeypatch.setattr(memory, "host_memory", lambda: (needed, 1 << 40))
    assert Engine.load(folder, LayerRange(0, 4)).loaded.context == 300
