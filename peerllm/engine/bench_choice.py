"""What choosing tokens costs, with and without top-k and top-p: `python3 -m peerllm.engine.bench_choice`.

Verdicts on blocks of random logits, in graphs: by the fused kernels, of a chooser with cuts and of one without, and by
torch's, which sorts the vocabulary. `peaks` are as a model's logits are; in `normal` ones every token may survive
top-p, as at a high temperature. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from peerllm.engine import benching, fused
from peerllm.engine.bench import Timer
from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.runner import GraphPool
from peerllm.engine.sampling import has_cut
from peerllm.protocol import limits
from peerllm.protocol.requests import Sampling

_PROGRAM = "python3 -m peerllm.engine.bench_choice"
KINDS = ("peaks", "normal")
SAMPLINGS = {
    "greedy": Sampling(),
    "plain": Sampling(temperature=0.8, seed=1),
    "top-p 0.9": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "top-k 50": Sampling(temperature=0.8, top_k=50, seed=1),
    "top-k 1000": Sampling(temperature=0.8, top_k=1000, seed=1),
    "top-k 50, top-p 0.9": Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=1),
    "top-p 0.999": Sampling(temperature=0.8, top_p=0.999, seed=1),
}
_VERDICTS = 10
"""Of the fused kernels in one graph, so that its launch hides behind them."""
_MOST_TOKENS = 1 << 18
"""Whose masses an int64 can sum (`cutting.MASS_SCALE`)."""


@dataclass(frozen=True, slots=True)
class Figure:
    chooser: str
    logits: str
    rows: int
    sampling: str
    microseconds: float

    def words(self) -> str:
        return f"{self.chooser}, {self.logits}, {self.rows} rows, {self.sampling}: {self.microseconds:.1f} µs"


def logits_of(kind: str, rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """float16 `[rows, vocabulary]` of one of `KINDS`."""
    made = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4)).to(device)
    return (torch.where(made > 2.5, made * 5, made - 2) if kind == "peaks" else made * 3).to(torch.float16)


def choosers(device: torch.device, *, rows: int, vocabulary: int) -> Iterator[tuple[str, bool, Chooser]]:
    """(name, whether it cuts, one for up to `rows` rows); the fused ones where their kernels run."""
    if fused.is_available(device):
        from peerllm.engine.fused.choosing import FusedChooser

        for is_cutting in (False, True):
            chooser: object = FusedChooser(
                max_rows=rows, columns=vocabulary, vocabulary=vocabulary, device=device,
                is_dependent=fused.has_dependent_launch(device), is_cutting=is_cutting,
            )  # fmt: skip
            yield f"fused {'with' if is_cutting else 'without'} cuts", is_cutting, chooser  # type: ignore[misc]
    yield "torch with cuts", True, Chooser(vocabulary=vocabulary, is_cutting=True)


def figures(device: torch.device, *, vocabulary: int, row_counts: list[int], repeats: int) -> Iterator[Figure]:
    """As they are measured."""
    most = max(row_counts)
    timer, pool = Timer(device, repeats), GraphPool(device)
    state = SamplingState.make(torch.zeros(1, dtype=torch.int64, device=device))
    slots, count, verdict = (torch.zeros(size, dtype=torch.int32, device=device) for size in (1, 1, 3))
    candidates = torch.zeros(most, dtype=torch.int32, device=device)
    logits = torch.empty(most, vocabulary, dtype=torch.float16, device=device)

    def judge(chooser: Chooser, rows: int, verdicts: int) -> None:
        for _ in range(verdicts):
            chooser.judge(logits, rows, slots, state, candidates, count, verdict)

    for name, is_cutting, chooser in choosers(device, rows=most, vocabulary=vocabulary):
        verdicts = 1 if isinstance(chooser, Chooser) else _VERDICTS
        for rows in row_counts:
            graph = pool.capture(partial(judge, chooser, rows, verdicts))
            for kind in KINDS:
                logits.copy_(logits_of(kind, most, vocabulary, device))
                for how, sampling in SAMPLINGS.items():
                    if has_cut(sampling) and not is_cutting:
                        continue
                    state.put(0, sampling)
                    milliseconds = timer.device_milliseconds(graph.replay, inner=2)
                    yield Figure(name, kind, rows, how, milliseconds * 1e3 / verdicts)


def main(arguments: list[str] | None = None) -> int:
    """The exit status, as `benching.run` has it."""
    return benching.run(_PROGRAM, partial(_main, arguments))


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9], help="of the blocks")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="each figure as a line of JSON")
    options = parser.parse_args(arguments)
    most = limits.MAX_CANDIDATES + 1
    if not all(1 <= rows <= most for rows in options.rows):
        parser.error(f"argument --rows: a block has 1 to {most} rows")
    if not 2 <= options.vocabulary <= _MOST_TOKENS:
        parser.error(f"argument --vocabulary: a number from 2 to {_MOST_TOKENS}")
    benching.check_repeats(parser, options.repeats)
    device = benching.use_device(parser, options.device, gpu_for="a choice is timed on a GPU")
    with torch.inference_mode():
        found = figures(device, vocabulary=options.vocabulary, row_counts=options.rows, repeats=options.repeats)
        for figure in found:
            print(json.dumps(asdict(figure)) if options.json else figure.words(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
