"""The engine's operations: what they refuse, and the edges of a sequence."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from peerllm.engine import codec
from peerllm.engine.engine import Engine
from peerllm.engine.machine import machine
from peerllm.protocol.errors import (
    BadRequest,
    ContextTooLong,
    DraftMismatch,
    EngineError,
    LayersMismatch,
    NonFinite,
    Overloaded,
    ProtocolError,
)
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine.pairs import GREEDY, Pair, Run, Scripted


@pytest.fixture
def model(tiny):
    return tiny("llama")


@pytest.fixture
def pair(model):
    return Pair.load(model.folder, context=64)


def test_a_sequence_fills_its_context_to_the_last_token(model, pair):
    prompt = model.prompts[0]
    count = 64 - len(prompt)
    expected = tiny_models.generate_greedily(model.whole, prompt, count)
    pair.first.drafter = Scripted("right", [*prompt, *expected], 304)
    assert pair.generate(prompt, count, 8).tokens == expected


def test_a_block_never_passes_the_contexts_end(model, pair):
    prompt = [1] * 60
    pair.first.drafter = Scripted("right", [1] * 100, 304)
    pair.open(1, GREEDY, prompt)
    block = pair.first.draft_block(1, 0, prompt, 8)
    # Token 59 and candidates 60 to 63: rows up to 64, the context.
    assert len(block.candidates) == 4
    pair.last.verify(1, block.start, block.candidates, block.payload)
    with pytest.raises(ContextTooLong):
        pair.first.draft_block(1, 60, [1] * 5, 8)


def test_a_prompt_longer_than_the_context_is_refused(pair):
    pair.first.open(1, GREEDY)
    with pytest.raises(ContextTooLong):
        pair.first.prefill(1, 0, tokens=[1] * 65)


def test_a_prompt_of_one_token_needs_no_prefill(model, pair):
    prompt = [17]
    assert pair.generate(prompt, 8, 4).tokens == tiny_models.generate_greedily(model.whole, prompt, 8)


def test_chunks_of_a_prompt_give_the_same_as_one(model, pair):
    prompt = model.prompts[16][:50]
    expected = tiny_models.generate_greedily(model.whole, prompt, 4)
    for chunk in (1, 7, 49, 128):
        pair.open(1, GREEDY, prompt, chunk=chunk)
        tokens = list(prompt)
        known = 0
        for _ in range(4):
            before = len(tokens)
            pair.step(1, known, tokens, 0, Run([]))
            known = before
        assert tokens[len(prompt) :] == expected


def test_a_block_may_be_drafted_again_and_judged_again(model, pair):
    """The verdict was lost on the way: the same tokens come again, and the same verdict."""
    prompt = model.prompts[0]
    pair.first.drafter = Scripted("right", [*prompt, *tiny_models.generate_greedily(model.whole, prompt, 9)], 304)
    pair.open(1, GREEDY, prompt)
    one = pair.first.draft_block(1, 0, prompt, 3)
    verdict = pair.last.verify(1, one.start, one.candidates, one.payload)
    two = pair.first.draft_block(1, len(prompt), [], 3)
    again = pair.last.verify(1, two.start, two.candidates, two.payload)
    assert (two.candidates, two.payload) == (one.candidates, one.payload)
    assert (again.accepted, again.next_token) == (verdict.accepted, verdict.next_token)


def test_committed_tokens_replace_what_was_known_from_an_index_on(model, pair):
    pair.first.open(1, GREEDY)
    pair.first.prefill(1, 0, tokens=[5, 6, 7])
    pair.first.draft_block(1, 3, [8], 0)
    pair.first.draft_block(1, 2, [9, 10], 0)
    assert pair.first.committed_tokens(1) == [5, 6, 9, 10]


@pytest.mark.parametrize(
    "act",
    [
        lambda pair: pair.first.draft_block(1, 9, [1], 0),
        lambda pair: pair.first.draft_block(1, 0, [], 0),
        lambda pair: pair.first.draft_block(1, 0, [1, 2, 3], 0),
        lambda pair: pair.first.draft_block(1, 0, [304], 0),
        lambda pair: pair.first.prefill(1, 0, tokens=[-1]),
        lambda pair: pair.first.prefill(1, 3, tokens=[1]),
        lambda pair: pair.first.verify(1, 0, [], b""),
        lambda pair: pair.first.forward(1, 0, 1, bytes(256)),
        lambda pair: pair.last.draft_block(1, 0, [1], 0),
        lambda pair: pair.last.verify(1, 1, [], bytes(256)),
        lambda pair: pair.last.verify(1, 0, [1], bytes(256)),
        lambda pair: pair.last.verify(1, 0, [999], bytes(512)),
        lambda pair: pair.last.prefill(1, 0, rows=1, payload=b"\xff" * 256),
    ],
)
def test_what_no_peer_may_ask_is_refused_and_the_session_lives_on(pair, act):
    for engine in (pair.first, pair.last):
        engine.open(1, GREEDY)
    with pytest.raises(ProtocolError):
        act(pair)
    prompt = [3, 4, 5]
    assert len(pair.generate(prompt, 4, 2).tokens) == 4


def test_a_session_that_is_not_open_is_an_error(pair):
    with pytest.raises(EngineError, match="not open"):
        pair.first.prefill(8, 0, tokens=[1])
    pair.first.close(8)


def test_more_sessions_than_slots_are_refused_and_a_closed_one_makes_room(model):
    engine = Engine.load(model.folder, LayerRange(0, 2), context=32, slots=2)
    engine.open(1, GREEDY)
    engine.open(2, GREEDY)
    engine.open(2, GREEDY)
    with pytest.raises(Overloaded):
        engine.open(3, GREEDY)
    engine.close(1)
    engine.open(3, GREEDY)


def test_opening_a_session_again_forgets_the_older_one(model, pair):
    pair.generate(model.prompts[0], 6, 2)
    pair.first.open(1, GREEDY)
    assert pair.first.committed_tokens(1) == []
    with pytest.raises(ProtocolError):
        pair.first.prefill(1, 1, tokens=[1])


def test_weights_that_are_not_finite_are_a_typed_error(model, tmp_path):
    last = Engine.load(model.folder, LayerRange(2, 4), context=32)
    with torch.no_grad():
        last.part.head.weight[5, 5] = float("nan")
    last.open(1, GREEDY)
    with pytest.raises(NonFinite):
        last.verify(1, 0, [], codec.encode(torch.randn(1, 64), "exact"))
    first = Engine.load(model.folder, LayerRange(0, 2), context=32)
    with torch.no_grad():
        first.part.embed.weight[7] = float("inf")
    first.open(1, GREEDY)
    with pytest.raises(NonFinite):
        first.draft_block(1, 0, [7], 0)


def test_the_drafter_stops_before_what_is_unlikely(model):
    pair = Pair.load(model.folder, context=64, draft=f"model:{model.draft}")
    prompt = model.prompts[3]
    pair.open(1, GREEDY, prompt)
    sure = pair.first.draft_block(1, 0, prompt, 8, 0.0)
    assert len(sure.candidates) == len(sure.probabilities) == 8
    bar = sorted(sure.probabilities)[4]
    picky = pair.first.draft_block(1, len(prompt), [], 8, bar)
    stop = next(i for i, p in enumerate(sure.probabilities) if p < bar)
    assert picky.candidates == sure.candidates[:stop]
    assert all(p >= bar for p in picky.probabilities)


def test_a_wider_head_of_the_draft_proposes_no_padding(model, tmp_path):
    """bugs.md 17: the draft's head has 312 rows, the target's 304; those beyond win wherever they are looked at."""
    draft = shutil.copytree(model.draft, tmp_path / "draft")
    file = draft / "model.safetensors"
    tensors = load_file(file)
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    head = tensors[name]
    assert head.shape[0] == 312
    head[304:] = head[:304].abs().max() * 50
    head[304:308] *= -1
    save_file(tensors, file, {"format": "pt"})
    pair = Pair.load(model.folder, context=64, draft=f"model:{draft}")
    prompt = model.prompts[3]
    pair.open(1, Sampling(temperature=1.5, seed=1), prompt)
    assert max(pair.first.draft_block(1, 0, prompt, 16).candidates) < 304


def test_a_draft_with_another_tokenizer_is_refused(model, tmp_path):
    other = tiny_models.make_model(tmp_path / "other")
    tiny_models.make_tokenizer(other, vocabulary=290)
    with pytest.raises(DraftMismatch, match="tokenizer"):
        Engine.load(model.folder, LayerRange(0, 2), draft=f"model:{other}")


def test_arguments_that_make_no_engine_are_named(model):
    for param, value in {"dtype": "load", "draft": "oracle", "weights": "q3"}.items():
        with pytest.raises(BadRequest) as caught:
            Engine.load(model.folder, LayerRange(0, 2), **{param: value})
        assert caught.value.param == param
    for layers in (LayerRange(2, 2), LayerRange(3, 5)):
        with pytest.raises(LayersMismatch):
            Engine.load(model.folder, layers)


def test_the_context_is_never_more_than_the_model_was_made_for(model):
    assert Engine.load(model.folder, LayerRange(0, 1), context=1 << 19).loaded.context == 512
    assert Engine.load(model.folder, LayerRange(0, 1)).loaded.context == 512


def test_half_precision_goes_through_both_codecs(model):
    for dtype in ("bfloat16", "float16"):
        for wire in ("exact", "int8"):
            pair = Pair.load(model.folder, context=64, dtype=dtype, wire_codec=wire)
            assert len(pair.generate(model.prompts[0], 6, 3).tokens) == 6


def test_the_machine_names_its_devices_and_dtypes_best_first():
    facts = machine()
    assert facts["devices"][-1]["device"] == "cpu"
    assert 0 < facts["devices"][-1]["free_bytes"] <= facts["devices"][-1]["total_bytes"]
    assert set(facts["dtypes"]) <= set(codec.DTYPES)


def test_a_rounds_time_is_split_into_its_parts(model, pair):
    prompt = model.prompts[0]
    pair.first.drafter = Scripted("right", [*prompt, *[5] * 9], 304)
    pair.open(1, GREEDY, prompt)
    block = pair.first.draft_block(1, 0, prompt, 3)
    verdict = pair.last.verify(1, block.start, block.candidates, block.payload)
    assert min(block.draft_us, block.layers_us, block.encode_us) >= 0 < block.layers_us
    assert verdict.layers_us > 0 < verdict.verdict_us
