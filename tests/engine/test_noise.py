"""Noise is a function of (seed, position, token), with bits that are the published generator's."""

import math

import pytest
import torch

from peerllm.engine import noise

# Known-answer vectors of Random123 1.14 for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, words):
    out = noise.philox_4x32(tuple(torch.tensor([each]) for each in counter), key)
    assert tuple(out[0].tolist()) == words


def test_a_word_is_found_by_seed_position_and_token_as_documented():
    seed, position, token = 0x299F31D0A4093822, 0x85A308D3, 4 * 7 + 3
    words = noise.noise_words(seed, torch.tensor([5, position]), vocabulary=41)
    counter = (torch.tensor([7]), torch.tensor([position]), torch.tensor([0]), torch.tensor([0]))
    assert words[1, token] == noise.philox_4x32(counter, (0xA4093822, 0x299F31D0))[0, 3]


def test_a_tokens_noise_does_not_depend_on_the_other_rows_or_on_the_vocabulary():
    wide = noise.noise_words(11, torch.arange(40, 49), vocabulary=1003)
    narrow = noise.noise_words(11, torch.tensor([44]), vocabulary=130)
    assert torch.equal(wide[4, :130], narrow[0])


def test_noise_differs_with_each_of_seed_position_and_token():
    words = noise.noise_words(1, torch.tensor([1, 2]), vocabulary=4000)
    other = noise.noise_words(2, torch.tensor([1]), vocabulary=4000)
    high = noise.noise_words(1 + (1 << 32), torch.tensor([1]), vocabulary=4000)
    assert len(torch.unique(torch.cat((words[0], words[1], other[0], high[0])))) > 15_990


def test_the_logarithm_is_that_of_the_formula_and_never_infinite():
    words = torch.tensor([0, 1, 1 << 16, 1 << 31, (1 << 32) - 1])
    found = noise.log_exponential(words)
    assert found.dtype == torch.float32
    for word, value in zip(words.tolist()[:-1], found.tolist()[:-1], strict=True):
        assert value == pytest.approx(math.log(-math.log1p(-(word + 0.5) / 2**32)), rel=1e-6)
    assert math.isfinite(found[-1].item())


def test_samples_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 20_000
    scores = noise.perturb(logits.expand(draws, 4), 99, torch.arange(draws))
    counts = torch.bincount(scores.argmax(dim=-1), minlength=4) / draws
    # Three standard deviations of a share near 1/2 over 20,000 draws are 0.011.
    assert torch.allclose(counts, torch.softmax(logits, dim=0), atol=0.012)
