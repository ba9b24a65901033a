"""How far two ways to compute the same logits are from float32, and whether one is as good as the other.

Half precision has no tolerance of its own: how far it is from float32 depends on the model (its depth, the size of its
logits, how the softmaxes amplify). But the eager modules in the same dtype, with the same weights, meet the same
model. So a path is held to what they show: no further from float32 than `FACTOR` times as far at the worst,
`FACTOR_RMS` times in the mean square, and one rounding of a logit more. The worst of some thousand rows is a matter of
luck, hence its larger factor; the mean square is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from peerllm.engine.engine import Engine

FACTOR = 2.0
FACTOR_RMS = 1.5


@dataclass
class Distance:
    """Of a path's logits from the reference's, over all rows that were added."""

    worst: float = 0.0
    squares: float = 0.0
    count: int = 0
    otherwise: list[float] = field(default_factory=list)
    """For each row that chooses another token than the reference: how much the reference prefers its own."""

    def add(self, logits: torch.Tensor, reference: torch.Tensor) -> None:
        """`[rows, vocabulary]` each, float32."""
        difference = (logits - reference).abs()
        chosen = logits.argmax(-1, keepdim=True)
        gaps = reference.max(-1).values - reference.gather(-1, chosen)[:, 0]
        # One copy to the host.
        found = torch.cat((difference.max()[None], difference.square().sum()[None], gaps)).tolist()
        worst, squares, *gap = found
        # max() would pass over a NaN that comes second.
        self.worst = worst if worst != worst else max(self.worst, worst)
        self.squares += squares
        self.count += difference.numel()
        self.otherwise += [each for each in gap if each > 0]

    @property
    def rms(self) -> float:
        return (self.squares / max(self.count, 1)) ** 0.5


@dataclass
class Comparison:
    """A path and the eager modules in `dtype`, both against float32."""

    dtype: torch.dtype
    path: Distance = field(default_factory=Distance)
    eager: Distance = field(default_factory=Distance)
    largest: float = 0.0
    """Of the reference's logits."""
    size: Distance = field(default_factory=Distance)

    def add(self, path: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> None:
        self.path.add(path.float(), reference)
        self.eager.add(eager.float(), reference)
        self.size.add(torch.zeros_like(reference), reference)

    @property
    def eps(self) -> float:
        return torch.finfo(self.dtype).eps

    @property
    def bound(self) -> float:
        """Of the path's worst distance."""
        return FACTOR * self.eager.worst + self.eps * self.size.worst

    @property
    def bound_rms(self) -> float:
        return FACTOR_RMS * self.eager.rms + self.eps * self.size.rms

    @property
    def bound_otherwise(self) -> float:
        """Rows that may choose otherwise than float32: as many as the eager modules', within four deviations."""
        count = len(self.eager.otherwise)
        return FACTOR_RMS * count + 4 * count**0.5 + 4

    def faults(self) -> list[str]:
        """In words; empty where the path is as good as the modules."""
        found = []
        if not self.path.worst <= self.bound:
            found.append(f"{self.path.worst:.4g} from float32 at the worst; {self.bound:.4g} is allowed")
        if not self.path.rms <= self.bound_rms:
            found.append(f"{self.path.rms:.4g} from float32 in the mean square; {self.bound_rms:.4g} is allowed")
        if not len(self.path.otherwise) <= self.bound_otherwise:
            found.append(f"{len(self.path.otherwise)} rows choose otherwise; {self.bound_otherwise:.0f} are allowed")
        # Two logits that are each off by the bound.
        far = [gap for gap in self.path.otherwise if gap > 2 * self.bound]
        if far:
            found.append(f"{len(far)} rows choose otherwise and are no near ties: {max(far):.4g} apart")
        return found

    def words(self) -> str:
        return (
            f"from float32: {self.path.worst:.4g} at the worst (modules {self.eager.worst:.4g}, allowed "
            f"{self.bound:.4g}), {self.path.rms:.4g} in the mean square (modules {self.eager.rms:.4g}, allowed "
            f"{self.bound_rms:.4g}); {len(self.path.otherwise)} rows choose otherwise (modules "
            f"{len(self.eager.otherwise)}), the farthest tie {max(self.path.otherwise, default=0.0):.4g}; logits up to "
            f"{self.size.worst:.3g}"
        )


def rounded(reference: Engine, dtype: torch.dtype) -> Engine:
    """The float32 engine with weights rounded to `dtype`: so distances are of the arithmetic alone. int8 weights and
    their scales are the same in all dtypes."""
    for name, parameter in reference.part.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith("scales"):
            parameter.data = parameter.data.to(dtype).to(torch.float32)
    return reference


def random_rewinds(engines: list[Engine], count: int, seed: int, *, slot: int = 2) -> Iterator[list[torch.Tensor]]:
    """The logits of each engine for blocks of 1 to 65 random tokens after random rewinds, float32.

    Every tenth time what is past the position is poisoned: keys with NaN, values with large numbers.
    """
    rng = random.Random(seed)
    length = 0
    for turn in range(count):
        keep = rng.randint(max(0, length - 70), length)
        if keep > 180:
            keep = rng.randrange(40)
        rows = rng.choice([1, 1, 2, 5, 9, 9, 17, 40, 65])
        tokens = [rng.randrange(300) for _ in range(rows)]
        found = []
        for engine in engines:
            cache = engine._cache
            cache.rewind(slot, keep)
            if turn % 10 == 0:
                poison(cache)
            hidden = engine._runner.forward(slot, engine.part.inputs_of(tokens))
            cache.advance([slot], rows)
            found.append(engine.part.logits(hidden).float())
        length = keep + rows
        yield found


def poison(cache: object) -> None:
    for slot, length in enumerate(cache.lengths):
        cache.keys[:, slot, :, length:] = float("nan")
        cache.values[:, slot, :, length:] = 6e4
