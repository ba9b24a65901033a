"""Many sequences at once: each is as if it were alone."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine import batch
from peerllm.engine.batch import BatchDecoder
from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.sampling import choose
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import load_weights
from peerllm.protocol.errors import ContextTooLong, NonFinite, NotEnoughMemory
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests.engine.pairs import Pair

SHARED = [5, 6, 7]
PROMPTS = ([5, 6, 7], [5, 6, 7, 9, 10, 11, 12, 13], [30, 31, 32, 33], [5, 6, 7, 100], [40], [5, 6])
HOW = (
    Sampling(),
    Sampling(temperature=0.8, seed=2),
    Sampling(temperature=0.8, seed=1 << 45),
    Sampling(seed=9),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.3, seed=6),
)
STOP = 7
TOKENS = 40


@pytest.fixture(scope="module")
def part(tiny):
    folder = tiny("llama").folder
    part = ModelSlice(read_config(folder), LayerRange(0, 4))
    load_weights(part, folder, torch.float32, "cpu", lambda stage, fraction: None)
    return part


@pytest.fixture(scope="module")
def alone(tiny):
    """What the engine itself answers to each prompt, up to the stop."""
    pair = Pair.load(tiny("llama").folder, context=200)
    answers = [pair.generate(prompt, TOKENS, 0, how).tokens for prompt, how in zip(PROMPTS, HOW, strict=True)]
    return [answer[: answer.index(STOP) + 1] if STOP in answer else answer for answer in answers]


def decode(decoder: BatchDecoder, order: list[int]) -> dict[int, list[int]]:
    """Answers by the number of their prompt; slots are filled again as they become idle."""
    waiting, working, found = list(order), {}, {}
    while waiting or working:
        slots = decoder.idle()[: len(waiting)]
        some, waiting = waiting[: len(slots)], waiting[len(slots) :]
        working.update(zip(slots, some, strict=True))
        decoder.begin(
            slots,
            [PROMPTS[index] for index in some],
            temperatures=[HOW[index].temperature for index in some],
            seeds=[HOW[index].seed for index in some],
            lengths=[len(PROMPTS[index]) + TOKENS for index in some],
        )
        for slot in decoder.run():
            index = working.pop(slot)
            text = decoder.text(slot).tolist()
            assert text[: len(PROMPTS[index])] == PROMPTS[index]
            found[index] = text[len(PROMPTS[index]) :]
    return found


@pytest.mark.parametrize(("slots", "window"), [(1, 16), (2, 5), (6, 1)])
def test_each_sequence_of_a_ragged_batch_is_the_engines_own_answer(part, alone, slots, window):
    decoder = BatchDecoder(part, slots=slots, capacity=100, stops=[STOP], shared=SHARED, window=window)
    # Stale rows of what slots held before change nothing.
    decoder._cache.keys[:, :, :, 3:] = float("nan")
    decoder._cache.values[:, :, :, 3:] = 1e30
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        found = decode(decoder, order)
        assert [found[index] for index in range(len(PROMPTS))] == alone


def test_a_sequence_that_ended_goes_on_as_if_its_prompt_had_been_longer(tiny, part):
    pair = Pair.load(tiny("llama").folder, context=200)
    decoder = BatchDecoder(part, slots=2, capacity=100, stops=[], shared=SHARED, window=4)
    prompt = list(PROMPTS[1])
    decoder.begin([1], [prompt], temperatures=[1.0], seeds=[4], lengths=[len(prompt) + 6])
    while decoder.run() != [1]:
        pass
    said = decoder.text(1).tolist()
    decoder.go_on([1], [[50, 51]], temperatures=[0.0], lengths=[len(said) + 2 + 12])
    while decoder.run() != [1]:
        pass
    whole = decoder.text(1).tolist()
    assert whole[: len(said) + 2] == [*said, 50, 51]
    assert whole[len(said) + 2 :] == pair.generate([*said, 50, 51], 12, 0, Sampling()).tokens


def test_a_prompt_that_leaves_no_room_is_refused(part):
    decoder = BatchDecoder(part, slots=1, capacity=10, stops=[])
    for prompt in ([], list(range(10))):
        with pytest.raises(ContextTooLong):
            decoder.begin([0], [prompt], temperatures=[0.0], seeds=[0], lengths=[10])


def test_a_full_sequence_ends_at_the_capacity(part):
    decoder = BatchDecoder(part, slots=1, capacity=12, stops=[])
    decoder.begin([0], [[3, 4]], temperatures=[0.0], seeds=[0], lengths=[1000])
    assert decoder.run() == [0]
    assert len(decoder.text(0)) == 12


def test_logits_that_are_not_finite_are_an_error_and_not_a_token(tiny):
    folder = tiny("llama").folder
    broken = ModelSlice(read_config(folder), LayerRange(0, 4))
    load_weights(broken, folder, torch.float32, "cpu", lambda stage, fraction: None)
    broken.head.weight[3, 3] = float("nan")
    decoder = BatchDecoder(broken, slots=2, capacity=20, stops=[])
    decoder.begin([0], [[3, 4]], temperatures=[0.0], seeds=[0], lengths=[10])
    with pytest.raises(NonFinite):
        decoder.run()


def test_memory_that_ends_means_fewer_slots(part, monkeypatch):
    make = part.make_cache

    def scarce(*, slots: int, capacity: int):
        if slots > 6:
            raise torch.OutOfMemoryError("no memory")
        return make(slots=slots, capacity=capacity)

    monkeypatch.setattr(part, "make_cache", scarce)
    assert BatchDecoder.fitting(part, slots=32, capacity=20, stops=[]).slots == 4
    monkeypatch.setattr(part, "make_cache", lambda **_: scarce(slots=99, capacity=1))
    with pytest.raises(NotEnoughMemory):
        BatchDecoder.fitting(part, slots=2, capacity=20, stops=[])


@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
@pytest.mark.parametrize("cut", [False, True])
def test_rows_of_a_batch_choose_as_single_rows_do(cut, device):
    """Each with its own seed, position and temperature; of a cut head with the target's noise."""
    torch.manual_seed(3)
    tokens = torch.tensor(sorted(torch.randperm(500)[:70].tolist())) if cut else None
    logits = torch.randn(5, 70) * 3
    state = SamplingState.make(torch.tensor([3, 90, 7, 0, 55]))
    how = [Sampling(temperature=0.7, seed=1), Sampling(), Sampling(temperature=1.2, seed=1 << 40), Sampling(), HOW[1]]
    for slot, each in enumerate(how):
        state.put(slot, each)
    slots = torch.tensor([4, 0, 2, 1, 3], dtype=torch.int32)
    chooser = Chooser(vocabulary=70, tokens=tokens)
    choose_all = chooser.choose if device == "cpu" else chooser._choose_in_graph
    choices, flags = choose_all(logits, slots.long(), state)
    expected = [
        int(choose(logits[row : row + 1], how[slot], state.positions[slot : slot + 1] + 1, tokens))
        for row, slot in enumerate(slots.tolist())
    ]
    assert choices.tolist() == expected
    assert flags.tolist() == [0] * 5


@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
def test_the_noise_of_a_large_batch_is_made_in_pieces(monkeypatch, device):
    torch.manual_seed(4)
    logits = torch.randn(9, 50)
    state = SamplingState.make(torch.arange(9))
    for slot in range(9):
        state.put(slot, Sampling(temperature=1.0, seed=slot))
    chooser = Chooser(vocabulary=50)
    choose_all = chooser.choose if device == "cpu" else chooser._choose_in_graph
    whole = choose_all(logits, torch.arange(9), state)[0].tolist()
    monkeypatch.setattr("peerllm.engine.choosing._NOISE_ROWS", 2)
    assert choose_all(logits, torch.arange(9), state)[0].tolist() == whole


def test_paths_are_known_by_name(part):
    from peerllm.protocol.errors import BadRequest

    with pytest.raises(BadRequest):
        BatchDecoder(part, slots=1, capacity=10, stops=[], path="eager")
    assert batch.MOST_SLOTS == 1024
