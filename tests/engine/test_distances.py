"""The bound that GPU paths are held to, where its parts can be seen without a GPU: half precision on the CPU."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine.engine import Engine
from peerllm.protocol.identity import LayerRange
from tests import tiny_models
from tests.engine.distances import Comparison, random_rewinds, rounded


def _compare(folder, dtype, *, spoil=None, blocks=40):
    def engine(of, path):
        return Engine.load(folder, LayerRange(0, 4), dtype=of, path=path, context=256, slots=4)

    kind = getattr(torch, dtype)
    path, eager, reference = engine(dtype, "graph"), engine(dtype, "eager"), rounded(engine("float32", "eager"), kind)
    if spoil is not None:
        spoil(path.part)
    found = Comparison(kind)
    with torch.inference_mode():
        for logits in random_rewinds([path, eager, reference], blocks, seed=3):
            found.add(*logits)
    print(found.words())
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.make_model(tmp_path_factory.mktemp("llama"), "llama", hidden=256, heads=8, kv_heads=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_another_order_of_sums_is_within_the_bound(llama, dtype):
    assert _compare(llama, dtype).faults() == []


def test_one_matrix_off_by_a_hundredth_is_not(llama):
    def spoil(part):
        part.layers[1].mlp.down_proj.weight.data.mul_(1.01)

    assert _compare(llama, "float16", spoil=spoil).faults() != []


def test_a_row_that_is_no_number_is_not():
    found = Comparison(torch.float16)
    reference = torch.zeros(2, 4)
    found.add(torch.full((2, 4), float("nan")), reference, reference)
    assert found.faults() != []


def test_a_choice_that_is_no_near_tie_is_named():
    found = Comparison(torch.float16)
    reference = torch.tensor([[0.0, 9.0, 1.0]])
    found.add(torch.tensor([[9.0, 0.0, 1.0]]), reference + 0.01, reference)
    assert any("near ties" in words for words in found.faults())
