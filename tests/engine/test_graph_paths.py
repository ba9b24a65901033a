"""Static buffers, buckets and the self-feeding draft, run on the CPU: the steps that graphs capture, in order."""

from __future__ import annotations

import random

import pytest
import torch

from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.engine import Engine
from peerllm.engine.runner import BUCKETS
from peerllm.engine.sampling import judge
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, NonFinite
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine.pairs import GREEDY, Pair

SETTINGS = (GREEDY, Sampling(temperature=0.8, seed=1 << 45), Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padded_blocks_on_static_buffers_give_the_eager_logits_after_any_rewind(tiny, family):
    folder = tiny(family).folder
    ours, theirs = (Engine.load(folder, LayerRange(0, 4), context=128, path=path) for path in ("graph", "eager"))
    rng = random.Random(8)
    length, worst = 0, 0.0
    for _ in range(150):
        keep = rng.randint(max(0, length - 30), length) if length < 80 else rng.randrange(9)
        block = torch.tensor([rng.randrange(300) for _ in range(rng.choice([1, 2, 4, 8, 9, 20, 40]))])
        logits = []
        for engine in (ours, theirs):
            engine._cache.rewind(1, keep)
            engine._cache.keys[:, 1, :, keep:] = float("nan")
            engine._cache.values[:, 1, :, keep:] = 1e30
            logits.append(engine.part.logits(engine._runner.forward(1, block)))
            engine._cache.advance([1], len(block))
        length = keep + len(block)
        worst = max(worst, float((logits[0] - logits[1]).abs().max()))
    assert worst < 1e-3


@pytest.mark.parametrize("how", SETTINGS, ids=["greedy", "sampling", "top-k and top-p"])
def test_text_by_the_self_feeding_draft_and_the_device_verdict_is_the_eager_text(tiny, how):
    model = tiny("llama")
    pair = Pair.load(model.folder, context=200, path="graph", draft=f"model:{model.draft}")
    eager = Pair.load(model.folder, context=200)
    assert isinstance(pair.first.drafter, GraphDrafter)
    drafted = accepted = 0
    for prompt in model.prompts[:8]:
        expected = eager.generate(prompt, 20, 0, how).tokens
        for length in (1, 5, 8):
            run = pair.generate(prompt, 20, length, how)
            assert run.tokens == expected
            drafted, accepted = drafted + run.drafted, accepted + run.accepted
    assert 0.2 * drafted < accepted < drafted


def test_an_identical_draft_agrees_always_for_every_length(tiny):
    model = tiny("qwen3")
    pair = Pair.load(model.folder, context=300, path="graph", draft=f"model:{model.folder}")
    for how in SETTINGS:
        for length in (1, 2, 5, 8, 33, 64):
            run = pair.generate(model.prompts[2], 66, length, how)
            assert run.accepted == run.drafted, (how, length)


def test_a_prompt_of_many_chunks_is_taken_in_by_buckets(tiny):
    model = tiny("llama")
    prompt = [index * 7 % 300 for index in range(3 * limits.PREFILL_CHUNK_ROWS + 5)]
    pair = Pair.load(model.folder, context=500, path="graph", draft=f"model:{model.draft}")
    expected = tiny_models.generate_greedily(model.whole, prompt, 6)
    pair.open(1, GREEDY, prompt, chunk=300)
    tokens = list(prompt)
    from tests.engine.pairs import Run

    known = 0
    while len(tokens) < len(prompt) + 6:
        before = len(tokens)
        pair.step(1, known, tokens, 2, Run([]))
        known = before
    assert tokens[len(prompt) :][:6] == expected


def test_the_self_feeding_draft_stops_before_what_is_unlikely(tiny):
    model = tiny("llama")
    pair = Pair.load(model.folder, context=200, path="graph", draft=f"model:{model.draft}")
    eager = Pair.load(model.folder, context=200, draft=f"model:{model.draft}")
    prompt = model.prompts[3]
    for bar in (0.0, 0.3, 0.6, 0.9):
        blocks = []
        for each in (pair, eager):
            each.open(1, GREEDY, prompt)
            blocks.append(each.first.draft_block(1, 0, prompt, 12, bar))
        assert blocks[0].candidates == blocks[1].candidates
        assert blocks[0].probabilities == pytest.approx(blocks[1].probabilities, abs=1e-4)


def test_a_draft_whose_logits_are_not_finite_drafts_nothing_and_the_text_goes_on(tiny):
    model = tiny("llama")
    for path in ("graph", "eager"):
        pair = Pair.load(model.folder, context=100, path=path, draft=f"model:{model.draft}")
        drafter = pair.first.drafter
        part = drafter._static.part if path == "graph" else drafter._model
        part.head.weight[3, 3] = float("nan")
        run = pair.generate(model.prompts[0], 8, 4)
        assert run.drafted == 0
        assert run.tokens == tiny_models.generate_greedily(model.whole, model.prompts[0], 8)


@pytest.mark.parametrize(
    "how", [*SETTINGS, Sampling(temperature=1.2, top_p=0.7, seed=4), Sampling(temperature=0.5, top_k=3, seed=5)]
)
def test_the_self_feeding_draft_proposes_what_the_eager_one_proposes(tiny, how):
    model = tiny("qwen3")
    pair = Pair.load(model.folder, context=200, path="graph", draft=f"model:{model.draft}")
    eager = Pair.load(model.folder, context=200, draft=f"model:{model.draft}")
    for prompt in model.prompts[:3]:
        blocks = []
        for each in (pair, eager):
            each.open(1, how, prompt)
            blocks.append(each.first.draft_block(1, 0, prompt, 12, 0.0))
        assert blocks[0].candidates == blocks[1].candidates
        assert blocks[0].probabilities == pytest.approx(blocks[1].probabilities, abs=1e-4)


@pytest.mark.parametrize("how", SETTINGS[:2], ids=["greedy", "sampling"])
def test_the_device_verdict_is_the_hosts(how):
    torch.manual_seed(2)
    for rows in BUCKETS[:6]:
        logits = torch.randn(rows, 320) * 4
        state = SamplingState.make(torch.tensor([3, 40]))
        state.put(1, how)
        slots = torch.tensor([1], dtype=torch.int32)
        positions = torch.arange(41, 41 + rows)
        from peerllm.engine.sampling import choose

        right = choose(logits[:, :300], how, positions).tolist()
        for count in {0, rows // 2, rows - 1}:
            for wrong in {0, count // 2, count}:
                candidates = right[:count]
                if wrong < count:
                    candidates[wrong] = (candidates[wrong] + 1) % 300
                buffer = torch.zeros(rows, dtype=torch.int32)
                buffer[:count] = torch.tensor(candidates, dtype=torch.int32)
                # What an older, longer block left behind must not count.
                buffer[count : rows - 1] = torch.tensor(right[count : rows - 1], dtype=torch.int32)
                verdict = torch.zeros(3, dtype=torch.int32)
                counts = torch.tensor([count], dtype=torch.int32)
                Chooser(vocabulary=300).judge(logits, rows, slots, state, buffer, counts, verdict)
                assert tuple(verdict.tolist()) == (*judge(logits[: count + 1, :300], candidates, 40, how), 0)


def test_logits_that_are_not_finite_are_a_typed_error_from_the_device_too(tiny):
    from peerllm.engine import codec

    last = Engine.load(tiny("llama").folder, LayerRange(2, 4), context=32, path="graph")
    last.part.head.weight[5, 5] = float("inf")
    last.open(1, GREEDY)
    with pytest.raises(NonFinite):
        last.verify(1, 0, [], codec.encode(torch.randn(1, 64), "exact"))


def test_an_unknown_path_is_refused(tiny):
    with pytest.raises(BadRequest):
        Engine.load(tiny("llama").folder, LayerRange(0, 4), path="warp")
