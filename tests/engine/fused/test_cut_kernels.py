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
@pytest.mark.parametrize("what", ["batch", "verdict", "draft"])
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
