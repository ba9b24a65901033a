"""Times of a round's parts on this machine, and what the draft gains over plain decoding at a round trip.

The times are of one peer's device running both halves of the target one after the other, which is what two peers like
this machine take together; the rounds are those of held-out answers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peerllm.engine.distill.evaluation import Drafting, all_rounds
from peerllm.engine.drafting.build import build_drafter
from peerllm.engine.drafting.distilled import load_distilled
from peerllm.engine.machine import host_memory
from peerllm.engine.plans import cache_positions
from peerllm.engine.running import make_runner
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import load_weights
from peerllm.models.allowlist import check_folder
from peerllm.models.layout import all_tensors, size_bytes
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling

ROUND_TRIPS_MS = (20, 80, 160)
_BLOCKS = (1, 2, 3, 5, 9, 13, 17)
_LENGTHS = (1, 2, 4, 8, 12, 16)
_STOPS = (0.0, 0.2, 0.4, 0.6)
_CONTEXT = 256
_REPEATS = 9
_DRAFTED = 8


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds."""

    draft_token: float
    blocks: dict[int, float]
    """Rows of a block to the time of all the target's layers and its head."""

    def block(self, rows: int) -> float:
        """Of a block of `rows`: that of the next length that was measured."""
        return next((ms for length, ms in sorted(self.blocks.items()) if length >= rows), max(self.blocks.values()))

    def to_map(self) -> dict[str, Any]:
        return {"draft_token_ms": self.draft_token, "block_ms": {str(rows): ms for rows, ms in self.blocks.items()}}


@dataclass(frozen=True, slots=True)
class Gain:
    """At one round trip, with the draft length and stopping probability that are best there."""

    round_trip_ms: float
    length: int
    stop: float
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def times_plain(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    def to_map(self) -> dict[str, Any]:
        return {**asdict(self), "times_plain": self.times_plain}


def gains(draftings: Sequence[Drafting], times: Times) -> list[Gain]:
    """For each of ROUND_TRIPS_MS."""
    found = []
    rounds = {(k, stop): all_rounds(draftings, k, stop) for k in _LENGTHS for stop in _STOPS}
    for trip in ROUND_TRIPS_MS:
        plain = 1e3 / (trip + times.block(1))
        best = Gain(trip, 0, 0.0, plain, plain)
        for (length, stop), each in rounds.items():
            rows = round(each.drafted_per_round) + 1
            milliseconds = trip + each.drafted_per_round * times.draft_token + times.block(rows)
            rate = 1e3 * each.tokens_per_round / milliseconds
            if rate > best.tokens_per_second:
                best = Gain(trip, length, stop, rate, plain)
        found.append(best)
    return found


def measure_times(draft: Path, target_folder: Path, part: ModelSlice) -> Times:
    """Of the draft in the folder `draft` and the loaded target, on the target's device and in its dtype."""
    context = min(part.shape.max_positions, _CONTEXT + 2 * max(_BLOCKS))
    capacity = cache_positions(context)
    part.prepare(capacity)
    cache = part.make_cache(slots=1, capacity=capacity)
    runner = make_runner(part, cache)
    drafter = build_drafter(
        f"model:{draft}",
        target_folder,
        vocabulary=part.shape.vocabulary,
        slots=1,
        context=context,
        dtype=part.dtype,
        device=part.device,
        embedding=None if part.embed is None else part.embed.weight.data,
        progress=lambda stage, fraction: None,
    )
    prompt = [index * 7 % part.shape.vocabulary for index in range(max(2, context // 2))]
    how = Sampling()
    with torch.inference_mode():
        inputs = torch.tensor(prompt, device=part.device)
        runner.open(0, how)
        runner.forward(0, inputs[:-1])
        cache.advance([0], len(prompt) - 1)
        blocks = {}
        for rows in _BLOCKS:
            work = partial(runner.verify, 0, inputs[-1:].repeat(rows), [0] * (rows - 1), len(prompt) - 1, how)
            blocks[rows] = _median_ms(work)
        one, many = (_median_ms(partial(drafter.propose, 0, prompt, count, 0.0, how)) for count in (1, 1 + _DRAFTED))
    return Times(max(1e-3, (many - one) / _DRAFTED), blocks)


def _median_ms(work: Callable[[], Any]) -> float:
    for _ in range(2):
        work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


@dataclass(frozen=True, slots=True)
class CpuCost:
    """One token on one CPU thread in float32, milliseconds."""

    draft_ms: float
    target_ms: float

    @property
    def share(self) -> float:
        return self.draft_ms / self.target_ms

    def to_map(self) -> dict[str, Any]:
        return {"draft_ms": self.draft_ms, "target_ms": self.target_ms, "share": self.share}


@torch.inference_mode()
def cpu_cost(draft: Path, target_folder: Path) -> CpuCost | None:
    """What a drafted token costs a CPU against one of the target's; None where the target is too large to try."""
    shape = check_folder(target_folder)
    if size_bytes(all_tensors(shape), "float32") > host_memory()[0] // 3:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = ModelSlice(read_config(target_folder), LayerRange(0, shape.layers))
        load_weights(whole, target_folder, torch.float32, "cpu", lambda stage, fraction: None)
        embedding = None if whole.embed is None else whole.embed.weight.data
        small = load_distilled(
            draft, target_folder, torch.float32, "cpu", embedding=embedding, progress=lambda stage, fraction: None
        )
        # Twice in turns, so that a machine that is busy meanwhile favours neither.
        pairs = [(_token_ms(small), _token_ms(whole)) for _ in range(2)]
        return CpuCost(min(small for small, _ in pairs), min(whole for _, whole in pairs))
    finally:
        torch.set_num_threads(threads)


def _token_ms(part: ModelSlice) -> float:
    rows = min(128, part.shape.max_positions - 1)
    part.prepare(rows + 1)
    cache = part.make_cache(slots=1, capacity=rows + 1)
    tokens = torch.arange(rows)[None] % part.shape.vocabulary
    part(tokens, cache.view([0], rows))
    cache.advance([0], rows)
    token = torch.zeros(1, 1, dtype=torch.int64)
    return _median_ms(lambda: part.logits(part(token, cache.view([0], 1))))
