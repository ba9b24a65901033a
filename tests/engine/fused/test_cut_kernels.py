"""Top-k and top-p by the fused kernels, with Triton's interpreter on the CPU; see `test_kernels`."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

has_triton = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not has_triton, reason="needs Triton, for its interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the compiled kernels"),
    pytest.mark.timeout(300),
]
VOCABULARY = 700


@pytest.mark.parametrize("capacity", [VOCABULARY, 64], ids=["listed", "too many to list"])
@pytest.mark.parametrize("what", ["batch", "verdict", "draft", "hard_rows"])
def test_a_cut_row_chooses_what_the_reference_chooses(what, capacity):
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    code = f"from tests.engine.fused import test_cut_kernels as t; t.check_{what}({capacity})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


def _chooser(capacity: int, max_rows: int, **options):
    """Of many blocks, programs and tiles, though the vocabulary is small."""
    from peerllm.engine.fused import choosing

    torch.set_num_threads(1)
    choosing._BLOCK, choosing._LISTED = 128, capacity
    choosing._LISTING_TILE, choosing._LISTING_TILES, choosing._TILE = 128, 2, 512
    return choosing.FusedChooser(
        max_rows=max_rows,
        vocabulary=VOCABULARY,
        device=torch.device("cpu"),
        is_dependent=False,
        is_cutting=True,
        **options,
    )


def check_batch(capacity: int) -> None:
    """Slots of all samplings at once, of a whole head and of a cut one."""
    from peerllm.engine.choosing import SamplingState
    from peerllm.engine.sampling import choose
    from tests.engine import cuts

    samplings = cuts.samplings(VOCABULARY)[::2]
    rows = len(samplings)
    slots = torch.arange(rows, dtype=torch.int32).flip(0)
    near = 0
    for kinds, ids in ((("normal", "flat"), None), (("ties", "peaks"), torch.arange(VOCABULARY) * 3 + 1)):
        chooser = _chooser(capacity, rows, columns=VOCABULARY, tokens=ids)
        state = SamplingState.make(torch.arange(rows) * 7)
        for slot, each in enumerate(samplings):
            state.put(slot, each)
        one, other = (cuts.logits_of(kind, rows, VOCABULARY, seed=1) for kind in kinds)
        logits = torch.where(torch.arange(rows)[:, None] % 3 < 2, one, other)
        choices, flags = chooser.choose(logits, slots, state)
        assert not flags.any()
        for row, slot in enumerate(slots.tolist()):
            how, at = samplings[slot], 7 * slot + 1
            expected = int(choose(logits[row : row + 1], how, torch.tensor([at]), ids))
            if cuts.is_near(logits[row], how, at, ids):
                near += 1
                print(f"{kinds}: the last bits decide for {how}; {int(choices[row])} and {expected}")
            else:
                assert int(choices[row]) == expected, (kinds, how)
    assert near <= 2


def check_verdict(capacity: int) -> None:
    from peerllm.engine.choosing import SamplingState
    from peerllm.engine.sampling import choose, judge
    from tests.engine import cuts

    for index, how in enumerate(cuts.samplings(VOCABULARY)[2::8]):
        logits = cuts.logits_of(("normal", "ties", "peaks")[index % 3], 4, VOCABULARY + 20, seed=index)
        looked_at = logits[:, :VOCABULARY]
        assert not any(cuts.is_near(looked_at[row], how, 41 + row) for row in range(4)), "another seed, then"
        chooser = _chooser(capacity, 4, columns=VOCABULARY + 20)
        state = SamplingState.make(torch.tensor([3, 40]))
        state.put(1, how)
        slots, counts = torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        candidates = choose(looked_at, how, torch.arange(41, 45))[:3].to(torch.int32)
        verdict = torch.zeros(3, dtype=torch.int32)
        chooser.judge(logits, 4, slots, state, candidates, counts, verdict)
        assert verdict.tolist() == [*judge(looked_at[:3], candidates[:2].tolist(), 40, how), 0]


def check_draft(capacity: int) -> None:
    """The probability says what was cut off, whichever of the survivors was drawn."""
    from peerllm.engine.choosing import SamplingState
    from peerllm.engine.drafting.model import candidate_probability
    from peerllm.engine.sampling import choose
    from peerllm.protocol.requests import Sampling
    from tests.engine import cuts

    cases = [
        (how, cuts.logits_of(("normal", "ties", "peaks")[index % 3], 1, VOCABULARY, seed=index))
        for index, how in enumerate(cuts.samplings(VOCABULARY))
    ]
    for p in (0.5, 0.9, 0.999):
        # One token has a little less than p, and all others tie: none of them may be left out of the list.
        logits = torch.zeros(1, VOCABULARY)
        logits[0, 300] = math.log((VOCABULARY - 1) * (1 / (1.1 * (1 - p)) - 1))
        cases.append((Sampling(temperature=1.0, top_p=p, seed=9), logits))
    near = 0
    for index, (how, logits) in enumerate(cases):
        if cuts.is_near(logits[0], how, 41):
            near += 1
            print(f"the last bits decide for {how}")
            continue
        chooser = _chooser(capacity, 1, columns=VOCABULARY)
        state = SamplingState.make(torch.tensor([3, 40]))
        state.put(1, how)
        slots = torch.tensor([1], dtype=torch.int32)
        token, step = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        proposed, chances = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
        chooser.advance(logits, slots, state, token, step, proposed, chances)
        assert int(token) == int(proposed[0]) == int(choose(logits, how, torch.tensor([41]))), how
        expected = float(candidate_probability(logits, how)[0, int(token)])
        assert abs(float(chances[0]) - expected) < 1e-5 * expected, how
        assert (int(step), int(state.positions[1])) == (1, 41)
        if index % 4 == 0:
            logits[0, 77] = (float("nan"), float("inf"))[index // 4 % 2]
            chooser.advance(logits, slots, state, token, step, proposed, chances)
            assert bool(chances[1].isnan()) and 0 <= int(token) < VOCABULARY
    assert near <= 4


def _hard_rows():
    """(what is hard, temperature 1 throughout, sampling, float32 `[1, VOCABULARY]`)."""
    from peerllm.protocol.requests import Sampling

    def sampling(k: int = 0, p: float = 1.0) -> Sampling:
        return Sampling(temperature=1.0, top_k=k, top_p=p, seed=k + int(p * 1000))

    generator = torch.Generator().manual_seed(8)
    made = torch.randn(1, VOCABULARY, generator=generator)
    some = torch.randperm(VOCABULARY, generator=generator)
    masked = (made * 3).index_fill(1, some[:600], float("-inf"))
    for k, p in ((50, 1.0), (50, 0.9), (200, 1.0), (200, 0.5), (0, 0.9), (0, 0.5)):
        yield "-inf", sampling(k, p), masked
    # Every block's best is 0, so the bins' edges are known: ties on both sides of some, and in the bin between two.
    edges = torch.full((1, VOCABULARY), -4.0)
    nearer = float(torch.nextafter(torch.tensor(-0.5), torch.tensor(0.0)))
    for start, score in enumerate((0.0, nearer, -0.5, -0.515624, -0.515625)):
        edges[0, start :: 20 if score else 60] = score
    for k in (1, 7, 30, 50, 80, 110, 140, 300):
        yield "edges of bins", sampling(k), edges
        yield "edges of bins", sampling(k, 0.8), edges
    for p in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9):
        yield "edges of bins", sampling(p=p), edges
    for k, p in ((300, 1.0), (300, 0.5), (0, 0.5), (0, 0.9)):
        yield "one bin", sampling(k, p), 10 + made * 1e-3
    far = torch.where(made > 2, made * 40, made)
    for k, p in ((20, 1.0), (300, 1.0), (300, 0.9), (650, 1.0), (650, 0.999), (699, 1.0), (0, 0.999)):
        yield "peaks far above", sampling(k, p), far
    hills = torch.where(made > 1.5, made * 3, made)
    for k, p in ((3, 1.0), (12, 1.0), (12, 0.7), (30, 0.9), (0, 0.3), (0, 0.7), (0, 0.9)):
        yield "hills", sampling(k, p), hills
    for seed in range(12):
        # The best after noise is mostly cut off.
        yield "flat", Sampling(temperature=1.0, top_p=0.2, seed=seed), made
        yield "flat", Sampling(temperature=1.0, top_k=100, top_p=0.8, seed=seed), made
        yield "flat", sampling(80 + seed * 30), made


def check_hard_rows(capacity: int) -> None:
    """One chooser goes from row to row: nothing of the row before is left."""
    from peerllm.engine.choosing import SamplingState
    from peerllm.engine.drafting.model import candidate_probability
    from peerllm.engine.sampling import scores_of
    from tests.engine import cuts

    chooser = _chooser(capacity, 1, columns=VOCABULARY)
    state = SamplingState.make(torch.tensor([40]))
    slots = torch.zeros(1, dtype=torch.int32)
    near = 0
    for name, how, logits in _hard_rows():
        if cuts.is_near(logits[0], how, 41):
            near += 1
            print(f"{name}: the last bits decide for {how}")
            continue
        state.put(0, how)
        state.positions.fill_(40)
        token, step = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        proposed, chances = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        chooser.advance(logits, slots, state, token, step, proposed, chances)
        assert int(token) == int(scores_of(logits, how, torch.tensor([41])).argmax()), (name, how)
        expected = float(candidate_probability(logits, how)[0, int(token)])
        assert abs(float(chances[0]) - expected) < 1e-5 * expected, (name, how)
    assert near <= 2
