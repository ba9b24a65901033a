"""A slice over several devices, and a draft that goes on while it computes. On the CPU a device may be named twice."""

from __future__ import annotations

import threading

import pytest
import torch

from peerllm.engine.chain import SliceChain
from peerllm.engine.drafting.ahead import AheadDrafter
from peerllm.engine.drafting.base import Proposal
from peerllm.engine.plans import split_range
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine.pairs import GREEDY, Pair

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make_model(tmp_path_factory.mktemp("devices"), "qwen2", is_tied=True)


@pytest.mark.parametrize(
    ("layers", "free", "expected"),
    [
        ((0, 14), [10, 10], ["0:7", "7:14"]),
        ((14, 28), [10, 30], ["14:18", "18:28"]),
        ((2, 4), [1, 1, 1], ["2:3", "3:4"]),
        ((3, 4), [1, 1], ["3:4"]),
        ((0, 6), [0, 0], ["0:3", "3:6"]),
    ],
)
def test_layers_are_shared_by_the_devices_memory(layers, free, expected):
    assert [str(each) for each in split_range(LayerRange(*layers), free)] == expected


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=3)])
def test_over_two_devices_the_text_is_that_of_one(folder, path, how):
    one = Pair.load(folder, context=128, slots=2, path=path)
    two = Pair.load(folder, context=128, slots=2, path=path, devices=("cpu", "cpu"), draft=f"model:{folder}")
    assert isinstance(two.first.part, SliceChain) and len(two.last.part.parts) == 2
    assert two.first.loaded.bytes["weights"] == one.first.loaded.bytes["weights"]
    expected = one.generate(PROMPT, 40, 0, how).tokens
    for length in (0, 3, 8):
        run = two.generate(PROMPT, 40, length, how)
        assert run.tokens == expected
        assert run.accepted >= (0.9 if how is GREEDY else 0.6) * run.drafted


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_the_text_is_the_same_where_the_embedding_stays_in_the_hosts_memory(
    folder, monkeypatch, path, devices, is_quantised
):
    options = {"context": 256, "slots": 2, "path": path, "devices": devices, "draft": f"model:{folder}"}
    options["weights"] = "int8" if is_quantised else "unquantised"
    here = Pair.load(folder, **options)
    monkeypatch.setattr("peerllm.engine.memory.is_embedding_apart", lambda shape, layers, *_, **__: layers.first == 0)
    apart = Pair.load(folder, **options)
    first = apart.first.part.parts[0] if len(devices) > 1 else apart.first.part
    assert first.is_first and not first.takes_tokens
    for how in (GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=3)):
        for length in (0, 3):
            assert (
                apart.generate(PROMPT * 30, 20, length, how).tokens
                == here.generate(PROMPT * 30, 20, length, how).tokens
            )


def test_a_middle_slice_may_be_spread_too(folder):
    spread = Pair.load(folder, 1, 3, context=128, slots=2, devices=("cpu", "cpu"))
    assert len(spread.middle[0].part.parts) == 2
    assert spread.generate(PROMPT, 20, 0).tokens == Pair.load(folder, context=128).generate(PROMPT, 20, 0).tokens


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_draft_on_a_device_of_its_own_has_the_next_block_ready_where_it_was_right(folder, tmp_path, path):
    draft = tiny_models.make_draft(tmp_path / "draft", folder, blur=0.01)
    options = {"context": 128, "slots": 2, "path": path, "draft": f"model:{draft}"}
    after, ahead = Pair.load(folder, **options), Pair.load(folder, draft_device="cpu", **options)
    expected, run = (pair.generate(PROMPT, 60, 3) for pair in (after, ahead))
    assert (run.tokens, run.rounds, run.accepted) == (expected.tokens, expected.rounds, expected.accepted)
    assert isinstance(ahead.first.drafter, AheadDrafter)
    assert 0 < ahead.first.drafter.hits <= run.rounds


class _Slow:
    """Counts up from the last token, once it is let go."""

    byte_count = 0

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.asked: list[list[int]] = []

    def propose(self, slot, tokens, limit, min_probability, sampling):
        self.may_go.wait(5)
        self.asked.append(tokens)
        return Proposal([tokens[-1] + 1 + index for index in range(limit)], [0.9] * limit)

    def forget(self, slot):
        self.asked.clear()


def test_it_drafts_while_others_work():
    inner = _Slow()
    drafter = AheadDrafter(inner)
    drafter.go_on(0, [1, 2, 3], 4, 0.0, GREEDY)
    assert inner.asked == []  # it returned at once: the slice computes now
    inner.may_go.set()
    # 4 is the token that the target added.
    assert drafter.propose(0, [1, 2, 3, 4], 3, 0.0, GREEDY).candidates == [5, 6, 7]
    assert (inner.asked, drafter.hits) == ([[1, 2, 3]], 1)


@pytest.mark.parametrize(
    ("tokens", "sampling", "least"),
    [([1, 2, 9], GREEDY, 0.0), ([1, 2, 3, 9], GREEDY, 0.0), ([1, 2, 3, 4], Sampling(temperature=1.0), 0.0)],
    ids=["rejected", "another token after", "another request"],
)
def test_what_it_guessed_wrongly_it_drafts_anew(tokens, sampling, least):
    inner = _Slow()
    inner.may_go.set()
    drafter = AheadDrafter(inner)
    drafter.go_on(0, [1, 2, 3], 4, 0.0, GREEDY)
    assert drafter.propose(0, tokens, 2, least, sampling).candidates == [tokens[-1] + 1, tokens[-1] + 2]
    assert (inner.asked[-1], drafter.hits) == (tokens, 0)


def test_what_was_drafted_for_a_sequence_is_forgotten_with_it():
    inner = _Slow()
    inner.may_go.set()
    drafter = AheadDrafter(inner)
    drafter.go_on(0, [1, 2, 3], 4, 0.0, GREEDY)
    drafter.forget(0)
    assert drafter.propose(0, [1, 2, 3, 4], 2, 0.0, GREEDY).candidates == [5, 6]
    assert drafter.hits == 0


def test_candidates_that_are_too_unlikely_now_are_not_proposed():
    inner = _Slow()
    inner.may_go.set()
    drafter = AheadDrafter(inner)
    drafter.go_on(0, [1, 2, 3], 4, 0.0, GREEDY)
    assert drafter.propose(0, [1, 2, 3, 4], 4, 0.95, GREEDY).candidates == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_over_two_gpus_the_text_is_that_of_one(folder):
    options = {"context": 128, "dtype": "float32", "draft": f"model:{folder}"}
    one = Pair.load(folder, devices=("cuda:0",), **options)
    two = Pair.load(folder, devices=("cuda:0", "cuda:1"), draft_device="cuda:1", **options)
    expected = one.generate(PROMPT, 60, 0).tokens
    run = two.generate(PROMPT, 60, 8)
    assert run.tokens == expected
    assert run.accepted >= 0.9 * run.drafted and two.first.drafter.hits > 0
