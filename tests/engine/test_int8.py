"""int8 weights: half the bytes, nearly the same model."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine.engine import Engine
from peerllm.engine.int8 import Int8Linear, quantise_weight
from peerllm.models import embedded
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.identity import LayerRange
from tests.engine import int8_quality
from tests.engine.pairs import Pair
from tests.engine.test_embedded_grid import IS_FULL

TEXTS = (
    "The tide comes in twice a day because the moon pulls on the sea, and the earth turns under the bulge of water "
    "that this raises. There is a second bulge on the far side, where the pull is weaker than on the earth as a whole.",
    "def greatest_common_divisor(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n\n"
    "def least_common_multiple(a, b):\n    return a * b // greatest_common_divisor(a, b)\n",
    "Bread needs flour, water, salt and yeast. Mix them, knead for ten minutes, and let the dough rise until it has "
    "doubled. Shape it, let it rise again, and bake it in a hot oven until the crust is brown and sounds hollow.",
    "In 1969 two astronauts walked on the moon while a third stayed in orbit. They brought back stones, took pictures, "
    "and left behind a plate that says that they came in peace for all mankind.",
)


def test_each_channels_largest_weight_is_kept_and_the_rest_are_within_half_a_step():
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 16)[:, None]
    values, scales = quantise_weight(weight)
    assert values.dtype == torch.int8
    error = (values * scales[:, None] - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())
    assert bool((values.abs().amax(1) == 127).all())


def test_a_channel_of_zeros_stays_zero():
    values, scales = quantise_weight(torch.zeros(2, 64))
    assert not values.any() and bool(torch.isfinite(scales).all())


def test_the_product_is_that_of_the_widened_weight():
    linear = torch.nn.Linear(64, 48)
    quantised = Int8Linear.of(linear)
    linear.requires_grad_(False)
    x = torch.randn(5, 64)
    wide = quantised.weight.float() * quantised.scales[:, None]
    expected = torch.nn.functional.linear(x, wide, linear.bias)
    assert torch.allclose(quantised(x), expected, atol=1e-5)
    assert 0 < float((quantised(x) - linear(x)).abs().max()) < 0.05


@torch.inference_mode()
@pytest.mark.embedded
def test_the_top_token_agrees_in_97_of_100_places_and_perplexity_hardly_moves():
    folder = embedded.folder()
    tokenizer = Tokenizer.load(folder)
    layers = LayerRange(0, 30)
    exact, small = (Engine.load(folder, layers, context=256, weights=kind) for kind in ("unquantised", "int8"))
    assert small.loaded.bytes["weights"] < 0.6 * exact.loaded.bytes["weights"]
    same = rows = 0
    losses = [0.0, 0.0]
    for text in TEXTS:
        tokens = torch.tensor(tokenizer.encode_prompt(text))
        logits = []
        for engine in (exact, small):
            engine._cache.rewind(0, 0)
            logits.append(engine.part.logits(engine._runner.forward(0, tokens)))
        same += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        rows += len(tokens)
        for index in range(2):
            losses[index] += float(torch.nn.functional.cross_entropy(logits[index][:-1], tokens[1:], reduction="sum"))
    change = (losses[1] - losses[0]) / rows
    print(f"the same top token in {same} of {rows} places; log perplexity changes by {change:+.4f}")
    assert same >= 0.97 * rows
    assert abs(change) < 0.05


@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_over_prompts_and_answers_the_top_token_agrees_in_97_of_100_places():
    """Seven of the test prompts; with PEERLLM_TEST_FULL=1 all 42."""
    quality = int8_quality.measure(embedded.folder(), int8_quality.PROMPTS[:: 1 if IS_FULL else 6])
    print(int8_quality.table(quality))
    same, places = quality.whole
    # So few prompts are known to 0.6 points: two of those below the bar that all 42 are held to.
    assert same >= (0.97 if IS_FULL else 0.958) * places
    for of_answers in (False, True):
        exact, small = quality.log_perplexities(of_answers=of_answers)
        assert abs(small - exact) < 0.05


def test_a_pair_may_mix_kinds_of_weights(tiny):
    model = tiny("qwen3")
    pair = Pair.load(model.folder, context=128)
    pair.last = Engine.load(model.folder, LayerRange(2, 4), context=128, weights="int8")
    plain = pair.generate(model.prompts[0], 12, 0).tokens
    pair.first.drafter = Pair.load(model.folder, context=128, draft=f"model:{model.draft}").first.drafter
    assert pair.generate(model.prompts[0], 12, 4).tokens == plain


def test_a_weight_that_is_no_number_is_found_as_without_quantising():
    weight = torch.randn(4, 8)
    weight[1, 2] = float("nan")
    linear = torch.nn.Linear(8, 4, bias=False)
    linear.weight = torch.nn.Parameter(weight)
    assert Int8Linear.of(linear)(torch.randn(3, 8)).isnan()[:, 1].all()


def test_in_float16_a_product_overflows_no_sooner_than_its_result():
    torch.manual_seed(0)
    linear = torch.nn.Linear(3584, 8, bias=False)
    linear.weight = torch.nn.Parameter(torch.randn(8, 3584) * 0.02)
    x = torch.randn(1, 3584)
    x[0, 5] = 3000.0
    exact = linear(x)
    small = Int8Linear.of(linear)
    found = small(x.half())
    assert torch.isfinite(found).all()
    assert torch.allclose(found.float(), small(x), rtol=5e-3, atol=0.5)
    assert torch.allclose(found.float(), exact, atol=2.0)
