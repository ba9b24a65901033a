"""Many sequences at once, each at a place of its own: what makes answers by the thousand.

A step runs every slot's next token through the whole model, chooses, and writes the choice as the slot's next input,
all on the device; a window of steps ends with one copy to the host. Slots that ended idle until the window's end and
are filled again together. A slot's prompt is a queue of tokens that replace its choices, so that there is one graph and
no prefill; what all prompts begin with is computed once and stays in every slot's cache.

A choice is design.md's: a function of (logits, seed, position), whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from peerllm.engine import fused, noise
from peerllm.engine.cache import KvCache
from peerllm.engine.choosing import SamplingState
from peerllm.engine.module_slice import ModuleSlice
from peerllm.engine.runner import GraphPool, Replay, StaticSlice, make_chooser
from peerllm.engine.slice import ModelSlice
from peerllm.protocol.errors import BadRequest, ContextTooLong, NonFinite, NotEnoughMemory

PATHS = ("auto", "graph", "fused")
MOST_SLOTS = 1024
_IDLE = -1
"""What a slot writes that has nothing to do."""


class BatchView:
    """The first `batch` slots' cache for `rows` rows each, at positions read on the device; `CacheView`'s attributes.

    Args:
        length: positions from 0 on that may be looked at: the host's bound, or the whole capacity in a graph.
    """

    has_stale_keys = True

    def __init__(self, cache: KvCache, batch: int, rows: int, length: int) -> None:
        device = cache.keys.device
        self._cache = cache
        self._batch = batch
        self._length = length
        steps = torch.arange(rows, device=device)
        self.positions = (cache.positions[:batch, None] + steps).clamp_(max=length - 1)
        columns = torch.arange(length, device=device)
        self.mask = (columns <= self.positions[:, :, None])[:, None]
        self._where = torch.arange(batch, device=device)[:, None], slice(None), self.positions

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._where] = key.transpose(1, 2)
        values[self._where] = value.transpose(1, 2)
        return keys[: self._batch, :, : self._length], values[: self._batch, :, : self._length]


class BatchModules(ModuleSlice):
    """`ModuleSlice` for all slots at once: where Triton is not, and on the CPU."""

    is_bound_to_slot = False

    def __init__(self, part: ModelSlice, cache: KvCache, *, max_rows: int) -> None:
        super().__init__(part, cache, max_rows=max_rows)
        self.slots = torch.arange(cache.slots, dtype=torch.int32, device=part.device)
        self.length = cache.capacity
        """Set by the host before an eager step: on the CPU what is masked costs as much as what is not."""

    def forward(self, rows_each: int, batch: int = 1) -> torch.Tensor:
        count = rows_each * batch
        view: Any = BatchView(self.cache, batch, rows_each, self.length)
        inputs = self.tokens[:count].view(batch, rows_each)
        self.hidden[:count] = self.part(inputs, view).reshape(count, -1)
        return self.hidden[:count]


def make_batch_static(part: ModelSlice, cache: KvCache, path: str, *, max_rows: int) -> StaticSlice:
    """Static buffers for all of the cache's slots. Raises BadRequest for an unknown path."""
    if path not in PATHS:
        raise BadRequest(f"path {path[:32]!r} is not one of {', '.join(PATHS)}", param="path")
    if path == "auto":
        path = "fused" if fused.is_available(part.device) and fused.supports(part) else "graph"
    if path == "graph":
        return BatchModules(part, cache, max_rows=max_rows)
    from peerllm.engine.fused.layers import FusedSlice

    dependent = fused.has_dependent_launch(part.device)
    static = FusedSlice(part, cache, max_rows=max_rows, max_batch=cache.slots, is_dependent=dependent)
    static.slots.copy_(torch.arange(cache.slots, dtype=torch.int32))
    return static


class BatchDecoder:
    """Decodes in `slots` slots at once with a whole model.

    Args:
        part: all layers, with weights.
        slots: sequences at once, at most MOST_SLOTS.
        capacity: tokens of one sequence, prompt and answer.
        stops: ids of tokens that end a sequence.
        shared: what every prompt begins with; may be empty.
        window: steps between two looks of the host.

    Raises:
        NotEnoughMemory: not even one slot fits; with more than one, torch's own error is raised.
    """

    def __init__(
        self,
        part: ModelSlice,
        *,
        slots: int,
        capacity: int,
        stops: Sequence[int],
        shared: Sequence[int] = (),
        window: int = 16,
        path: str = "auto",
    ) -> None:
        self.part = part
        self.slots = slots
        self.capacity = capacity
        self.shared = list(shared)[: capacity - 1]
        self._window = window
        device = part.device
        part.prepare(capacity)
        self._cache = part.make_cache(slots=slots, capacity=capacity)
        self.static = make_batch_static(part, self._cache, path, max_rows=max(slots, min(128, capacity)))
        vocabulary = part.shape.vocabulary
        self._chooser = make_chooser(self.static, max_rows=slots, columns=vocabulary, vocabulary=vocabulary)
        self._logits = torch.zeros(slots, vocabulary, dtype=part.dtype, device=device)
        self._state = SamplingState.make(self._cache.positions)

        def whole(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._queue, self._queue_at, self._queue_end = whole(slots, capacity), whole(slots), whole(slots)
        self._limits = whole(slots)
        self._running = torch.zeros(slots, dtype=torch.bool, device=device)
        self._is_stop = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_stop[torch.tensor(list(stops), dtype=torch.int64)] = True
        self._step = whole(1)
        # Rows: what each step said, then which slots run on, then logits that were not finite. One copy brings all.
        self._out = torch.zeros(window + 2, slots, dtype=torch.int32, device=device)
        self._texts = numpy.zeros((slots, capacity), dtype=numpy.int32)
        self._lengths = numpy.zeros(slots, dtype=numpy.int64)
        self._is_running = numpy.zeros(slots, dtype=bool)
        self._has_shared = numpy.ones(slots, dtype=bool)
        self._computed = slots
        with torch.inference_mode():
            pool = GraphPool(device)
            self._replay: Replay = pool.capture(self._advance)
            with pool.current():
                self._take_in_shared()

    @classmethod
    def fitting(cls, part: ModelSlice, *, slots: int, **options: Any) -> BatchDecoder:
        """With as many slots as there is memory for: `slots`, or a half, a quarter, … of it."""
        while True:
            try:
                return cls(part, slots=slots, **options)
            except torch.OutOfMemoryError as error:
                if slots == 1:
                    raise NotEnoughMemory("there is no memory to generate even one answer at a time") from error
                # The failed one's tensors hang on the error's traceback.
                error.__traceback__ = None
            torch.cuda.empty_cache()
            slots = max(1, slots // 2)

    # --- The host's side --------------------------------------------------------------------------------------------

    def idle(self) -> list[int]:
        """Slots that have nothing to do."""
        return numpy.flatnonzero(~self._is_running).tolist()

    @property
    def running(self) -> int:
        return int(self._is_running.sum())

    def text(self, slot: int) -> numpy.ndarray:
        """int32: all tokens of the slot's sequence so far, prompt and stop included."""
        return self._texts[slot, : self._lengths[slot]].copy()

    def begin(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        *,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """New sequences in idle slots.

        Args:
            prompts: whole ones, what is shared included.
            lengths: tokens at which each ends, prompt included.

        Raises:
            ContextTooLong: a prompt is empty or leaves no place for a token.
        """
        tokens, places, queues = [], [], []
        for slot, prompt in zip(slots, prompts, strict=True):
            if not 0 < len(prompt) < self.capacity:
                raise ContextTooLong(f"a prompt of {len(prompt)} tokens; from 1 to {self.capacity - 1} fit")
            is_alike = self._has_shared[slot] and list(prompt[: len(self.shared)]) == self.shared
            # Another beginning overwrites the shared rows of its slot.
            self._has_shared[slot] = is_alike
            kept = len(self.shared) if is_alike else 0
            place = min(kept, len(prompt) - 1)
            tokens.append(prompt[place])
            places.append(place)
            queues.append(prompt[place + 1 :])
            self._texts[slot, : place + 1] = prompt[: place + 1]
            self._lengths[slot] = place + 1
        keys = torch.tensor([noise.seed_key(seed) for seed in seeds], dtype=torch.int64).reshape(-1, 2)
        index = self._index(slots)
        self._state.seeds.index_copy_(0, index, keys.to(index.device))
        self._put(slots, tokens, places, queues, temperatures, lengths)

    def go_on(
        self,
        slots: Sequence[int],
        more: Sequence[Sequence[int]],
        *,
        temperatures: Sequence[float],
        lengths: Sequence[int],
    ) -> None:
        """Ended sequences go on with the tokens `more`, and then with choices again."""
        tokens = [int(self._texts[slot, self._lengths[slot] - 1]) for slot in slots]
        places = [int(self._lengths[slot]) - 1 for slot in slots]
        self._put(slots, tokens, places, more, temperatures, lengths)

    @torch.inference_mode()
    def run(self) -> list[int]:
        """One window of steps; gives the slots whose sequences ended in it.

        Raises:
            NonFinite: logits that are not finite.
        """
        if self.part.device.type == "cpu":
            self._narrow()
        self._step.zero_()
        for _ in range(self._window):
            self._replay.replay()
        out = self._out.to("cpu").numpy()
        if out[self._window + 1].any():
            raise NonFinite("the model gave logits that are not finite; try another --dtype")
        slots, steps = numpy.nonzero(out[: self._window].T != _IDLE)
        self._texts[slots, self._lengths[slots] + steps] = out[steps, slots]
        self._lengths += numpy.bincount(slots, minlength=self.slots)
        still = out[self._window].astype(bool)
        ended = numpy.flatnonzero(self._is_running & ~still)
        self._is_running = still
        return ended.tolist()

    def _narrow(self) -> None:
        """Eagerly, slots that are idle and rows that are not there cost as much as others: they are left out."""
        running = numpy.flatnonzero(self._is_running)
        self._computed = int(running.max(initial=0)) + 1
        self._out[: self._window].fill_(_IDLE)
        self._out[self._window :].zero_()
        if isinstance(self.static, BatchModules):
            longest = int(self._lengths[running].max(initial=1))
            self.static.length = min(self.capacity, longest + self._window)

    # --- The device's side ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """One step of every slot, or of the first `_computed`."""
        slots, static = self._computed, self.static
        tokens, positions = static.tokens[:slots], self._cache.positions[:slots]
        static.forward(1, slots)
        static.logits(slots, self._logits)
        choices, flags = self._chooser.choose(self._logits, static.slots[:slots], self._state)
        running, queue_at = self._running[:slots], self._queue_at[:slots]
        is_forced = queue_at < self._queue_end[:slots]
        place = queue_at.clamp(max=self.capacity - 1)[:, None]
        said = torch.where(is_forced, self._queue[:slots].gather(1, place)[:, 0], choices.to(torch.int64))
        out = self._out[:, :slots]
        out.index_copy_(0, self._step, torch.where(running, said, _IDLE).to(torch.int32)[None])
        tokens.copy_(torch.where(running, said, tokens))
        positions.add_(running)
        queue_at.add_(is_forced & running)
        is_over = (self._is_stop.index_select(0, said) & ~is_forced) | (positions + 1 >= self._limits[:slots])
        out[self._window + 1].add_(torch.where(running, flags, 0))
        running.logical_and_(~is_over)
        out[self._window].copy_(running)
        self._step.add_(1).clamp_(max=self._window - 1)

    @torch.inference_mode()
    def _take_in_shared(self) -> None:
        """Rows of what is shared, computed in slot 0 and copied to all."""
        most = len(self.static.tokens)
        self._cache.positions.zero_()
        for start in range(0, len(self.shared), most):
            piece = self.shared[start : start + most]
            self.static.tokens[: len(piece)] = torch.tensor(piece)
            self.static.forward(len(piece), 1)
            self._cache.positions.add_(len(piece))
        rows = len(self.shared)
        for stored in (self._cache.keys, self._cache.values):
            stored[:, 1:, :, :rows] = stored[:, :1, :, :rows]
        self._cache.positions.zero_()
        # Warm-ups of the capture ran steps.
        self._step.zero_()
        self._out.zero_()

    @torch.inference_mode()
    def _put(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        places: Sequence[int],
        queues: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        lengths: Sequence[int],
    ) -> None:
        if not slots:
            return
        index = self._index(slots)
        device = index.device
        ends = numpy.array([len(queue) for queue in queues], dtype=numpy.int64)
        table = numpy.zeros((len(slots), 4 + max(1, int(ends.max(initial=1)))), dtype=numpy.int64)
        table[:, 0], table[:, 1], table[:, 2] = tokens, places, ends
        table[:, 3] = numpy.minimum(lengths, self.capacity)
        for row, queue in enumerate(queues):
            table[row, 4 : 4 + len(queue)] = queue
        there = torch.from_numpy(table).to(device)
        self.static.tokens.index_copy_(0, index, there[:, 0])
        self._cache.positions.index_copy_(0, index, there[:, 1])
        self._queue_end.index_copy_(0, index, there[:, 2])
        self._limits.index_copy_(0, index, there[:, 3])
        self._queue_at.index_fill_(0, index, 0)
        self._queue[index, : table.shape[1] - 4] = there[:, 4:]
        self._state.temperatures.index_copy_(0, index, torch.tensor(temperatures, dtype=torch.float32, device=device))
        self._running.index_fill_(0, index, True)
        self._is_running[list(slots)] = True

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self.part.device)
