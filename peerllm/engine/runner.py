"""How a slice runs a block: eager, or by captured graphs. One interface, so that all around it is the same code.

A graph is of one block length; blocks are padded to the next of `BUCKETS`, plain decoding included. What padding writes
stands past the position, is masked, and is overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from peerllm.engine.cache import KvCache
from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.module_slice import ModuleSlice
from peerllm.engine.results import Stopwatch
from peerllm.engine.sampling import has_cut, judge
from peerllm.engine.slice import ModelSlice
from peerllm.protocol import limits
from peerllm.protocol.errors import NonFinite
from peerllm.protocol.requests import Sampling

BUCKETS = (1, 2, 3, 5, 9, 13, 17, 33, limits.MAX_CANDIDATES + 1)
"""Block lengths that have a graph of their own: K + 1 for the usual K."""
PREFILL_BUCKETS = (limits.PREFILL_CHUNK_ROWS,)
"""Chunks of a prompt; these have no verdict."""


class Runner(Protocol):
    """Runs blocks of one slice. The caller has rewound the slot to the block's start and advances it after."""

    verdict_us: int
    """Of the last `verify`: norm, head and choice, in microseconds; 0 where they are part of the layers' graph."""

    def forward(self, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states `[rows, width]` of `inputs`, the part's `inputs_of` tokens or hidden states `[rows, width]`;
        valid until the next call."""
        ...

    def verify(
        self, slot: int, inputs: torch.Tensor, candidates: list[int], start: int, sampling: Sampling
    ) -> tuple[int, int]:
        """(accepted, next token) of a block. Raises NonFinite."""
        ...

    def open(self, slot: int, sampling: Sampling) -> None:
        """A sequence begins in `slot`."""
        ...


class EagerRunner:
    """The modules, kernel by kernel."""

    def __init__(self, part: ModelSlice, cache: KvCache) -> None:
        self._part = part
        self._cache = cache
        self.verdict_us = 0

    def open(self, slot: int, sampling: Sampling) -> None:
        pass

    def forward(self, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        return self._part(inputs[None], self._cache.view([slot], len(inputs)))[0]

    def verify(
        self, slot: int, inputs: torch.Tensor, candidates: list[int], start: int, sampling: Sampling
    ) -> tuple[int, int]:
        hidden = self.forward(slot, inputs)
        watch = Stopwatch()
        verdict = judge(self._part.logits(hidden), candidates, start, sampling)
        self.verdict_us = watch.lap_us()
        return verdict


class StaticSlice(Protocol):
    """What graphs capture: `module_slice.ModuleSlice` or `fused.layers.FusedSlice`."""

    part: ModelSlice
    cache: KvCache
    slots: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    is_bound_to_slot: bool
    is_dependent: bool

    @property
    def source(self) -> torch.Tensor: ...
    def forward(self, rows_each: int, batch: int = 1) -> torch.Tensor: ...
    def logits(self, count: int, out: torch.Tensor) -> torch.Tensor: ...


class GraphRunner:
    """Graphs of `static`'s layers for each bucket, and on a last slice of the verdict too.

    On the CPU, where there are no graphs, the same steps run eagerly on the same static buffers: for tests.
    """

    def __init__(
        self,
        static: StaticSlice,
        *,
        buckets: tuple[int, ...] = BUCKETS,
        prefill_buckets: tuple[int, ...] = PREFILL_BUCKETS,
        pool: GraphPool | None = None,
    ) -> None:
        self.verdict_us = 0
        self._static = static
        self._part = static.part
        self._buckets = tuple(sorted({*buckets, *prefill_buckets}))
        self._pool = GraphPool(static.part.device) if pool is None else pool
        device = static.part.device
        self._layers: dict[tuple[int, int], Replay] = {}
        self._verdicts: dict[tuple[int, int], Replay] = {}
        self._cut_verdicts: dict[int, Replay] = {}
        self._state = SamplingState.make(static.cache.positions)
        self._slot = -1
        most = max(buckets)
        if self._part.is_last:
            vocabulary = self._part.shape.vocabulary
            self._logits = torch.zeros(most, vocabulary, dtype=self._part.dtype, device=device)
            self._choosers = make_choosers(static, max_rows=most, columns=vocabulary, vocabulary=vocabulary)
            self._candidates = torch.zeros(most, dtype=torch.int32, device=device)
            self._count = torch.zeros(1, dtype=torch.int32, device=device)
            self._verdict = torch.zeros(3, dtype=torch.int32, device=device)
        # The largest first: the rest fit into its memory.
        for slot in range(static.cache.slots if static.is_bound_to_slot else 1):
            self._select(slot)
            for rows in reversed(self._buckets):
                self._layers[rows, slot] = self._pool.capture(partial(static.forward, rows))
                if self._part.is_last and rows <= most:
                    self._verdicts[rows, slot] = self._pool.capture(partial(self._verify, rows))
        if self._part.is_last and self._choosers.needs_own_graphs:
            for rows in reversed([each for each in self._buckets if each <= most]):
                self._cut_verdicts[rows] = self._pool.capture(partial(self._judge, rows, self._choosers.cutting))
        self._select(0)

    def open(self, slot: int, sampling: Sampling) -> None:
        self._state.put(slot, sampling)

    def forward(self, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        rows = len(inputs)
        most = self._buckets[-1]
        if rows <= most:
            return self._forward(slot, inputs)
        done, cache = [], self._static.cache
        start = cache.lengths[slot]
        for first in range(0, rows, most):
            piece = inputs[first : first + most]
            done.append(self._forward(slot, piece).clone())
            cache.advance([slot], len(piece))
        cache.rewind(slot, start)
        return torch.cat(done)

    def _forward(self, slot: int, inputs: torch.Tensor) -> torch.Tensor:
        self._put(slot, inputs)
        self._replay(self._layers, slot, len(inputs))
        return self._static.hidden[: len(inputs)]

    def verify(
        self, slot: int, inputs: torch.Tensor, candidates: list[int], start: int, sampling: Sampling
    ) -> tuple[int, int]:
        if len(inputs) > len(self._logits):
            raise ValueError(f"a block of {len(inputs)} rows; {len(self._logits)} are the most")
        self._put(slot, inputs)
        if candidates:
            self._candidates[: len(candidates)] = torch.tensor(candidates, dtype=torch.int32)
        self._count.fill_(len(candidates))
        if self._choosers.needs_own_graphs and has_cut(sampling):
            self._replay(self._layers, slot, len(inputs))
            self._cut_verdicts[self._bucket(len(inputs))].replay()
        else:
            self._replay(self._verdicts, slot, len(inputs))
        accepted, token, bad = self._verdict.tolist()
        if bad:
            raise NonFinite("the model gave logits that are not finite; its weights or its dtype do not fit")
        return accepted, token

    def _verify(self, rows: int) -> None:
        self._static.forward(rows)
        self._judge(rows, self._choosers.usual)

    def _judge(self, rows: int, chooser: Chooser) -> None:
        """The verdict on what the layers left in the static buffers."""
        static = self._static
        static.logits(rows, self._logits)
        chooser.judge(self._logits, rows, static.slots, self._state, self._candidates, self._count, self._verdict)

    def _put(self, slot: int, inputs: torch.Tensor) -> None:
        self._select(slot)
        if self._part.takes_tokens:
            self._static.tokens[: len(inputs)] = inputs
        else:
            self._static.source[: len(inputs)] = inputs

    def _select(self, slot: int) -> None:
        if slot != self._slot:
            self._static.slots.fill_(slot)
            if isinstance(self._static, ModuleSlice):
                self._static.slot = slot
            self._slot = slot

    def _bucket(self, rows: int) -> int:
        return next(each for each in self._buckets if each >= rows)

    def _replay(self, graphs: dict[tuple[int, int], Replay], slot: int, rows: int) -> None:
        graphs[self._bucket(rows), slot if self._static.is_bound_to_slot else 0].replay()


class Replay(Protocol):
    def replay(self) -> None: ...


class _Eager:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class GraphPool:
    """Captures graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None
        # The allocator keeps memory for each stream: what one capture left is the next one's only on the same stream.
        # It is not torch's own for captures, which belongs to the first device that captured and would lead there.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the device the current one, where Triton's launches go."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def capture(self, work: Callable[[], Any]) -> Replay:
        """A graph of what `work()` does; three warm-ups on a side stream come first."""
        stream = self._stream
        if stream is None:
            return _Eager(work)
        with self.current(), torch.inference_mode():
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(3):
                    work()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._handle, stream=stream):
                work()
            if self._handle is None:
                self._handle = graph.pool()
        return graph


class Choosers(NamedTuple):
    """Of one head: the one that every request's graph has, and the one for requests with top-k or top-p."""

    usual: Chooser
    cutting: Chooser
    """Triton's leaves a row that has neither at once, and is the usual one too. torch's sorts the vocabulary."""

    @property
    def needs_own_graphs(self) -> bool:
        return self.usual is not self.cutting


def make_choosers(static: StaticSlice, *, max_rows: int, columns: int, vocabulary: int) -> Choosers:
    """As `make_chooser`, of the same kind."""

    def make(is_cutting: bool) -> Chooser:
        return make_chooser(static, max_rows=max_rows, columns=columns, vocabulary=vocabulary, is_cutting=is_cutting)

    cutting = make(True)
    return Choosers(make(False) if isinstance(static, ModuleSlice) else cutting, cutting)


def make_chooser(
    static: StaticSlice, *, max_rows: int, columns: int, vocabulary: int, is_cutting: bool = False
) -> Chooser:
    """Triton's where the slice is fused, torch's otherwise. One that is not cutting takes top-k and top-p to be off."""
    if isinstance(static, ModuleSlice):
        return Chooser(vocabulary=vocabulary, tokens=static.part.head_tokens, is_cutting=is_cutting)
    from peerllm.engine.fused.choosing import FusedChooser

    chooser: object = FusedChooser(
        max_rows=max_rows,
        columns=columns,
        vocabulary=vocabulary,
        device=static.part.device,
        is_dependent=static.is_dependent,
        tokens=static.part.head_tokens,
        is_cutting=is_cutting,
    )
    return chooser  # type: ignore[return-value]
