"""How fast the engine's steps are, against what memory allows: `python3 -m peerllm.engine.bench`.

Random weights of a named shape. The limit of a step is its bytes (weights, and the keys and values of the context) over
the copy bandwidth that is measured in the same run. Needs torch and transformers alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peerllm.engine import benching, fused
from peerllm.engine.bench_limits import copy_bandwidth, matrix_rate, step_bytes
from peerllm.engine.bench_report import PATHS, report
from peerllm.engine.cache import KvCache
from peerllm.engine.codec import DTYPES
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.engine.int8 import quantise_layer
from peerllm.engine.out_of_memory import give_back, is_out_of_memory
from peerllm.engine.plans import cache_positions
from peerllm.engine.runner import BUCKETS, EagerRunner, GraphRunner
from peerllm.engine.running import make_static
from peerllm.engine.shapes import NAMES, named_config, random_slice
from peerllm.engine.slice import ModelSlice
from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling

_PROGRAM = "python3 -m peerllm.engine.bench"
_PREFILL_TOKENS = 2048
_PREFILL_CHUNKS = (512, 128, 68)
"""Rows. The last is what daemons send at 7B's width in int8: as many as fill a slice of the link."""
_DRAFT_LENGTH = 8
_TRACED_BLOCKS = 3
_ROOM = 64
"""Positions that the context still has when a step is timed."""


class Timer:
    """Medians of repeated work; on a GPU the device is idle before and after."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def milliseconds(self, work: Callable[[], Any], *, warmups: int = 3) -> float:
        for _ in range(warmups):
            work()
        times = []
        for _ in range(self._repeats):
            self.synchronise()
            start = time.perf_counter()
            work()
            self.synchronise()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def device_milliseconds(self, work: Callable[[], Any], *, inner: int = 10) -> float:
        """Of one `work`, by the device's own clock over `inner` in a row: launches of one hide behind another."""
        if self._device.type != "cuda":
            return self.milliseconds(work)
        for _ in range(3):
            work()
        times = []
        for _ in range(self._repeats):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(inner):
                work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / inner)
        return statistics.median(times)

    def synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _works(path: str, device: torch.device) -> bool:
    if path == "eager":
        return True
    return device.type == "cuda" and (path == "graph" or fused.is_available(device))


class Bench:
    """Rows of the table, as far as they fit the device.

    Args:
        paths: those of `PATHS` that run on `device`, one beside int8 at least.
    """

    def __init__(self, device: torch.device, paths: list[str], options: argparse.Namespace) -> None:
        self.device = device
        self.dtype = DTYPES[options.dtype]
        self.context = options.context
        self.timer = Timer(self.device, options.repeats)
        self.paths = paths
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = copy_bandwidth(self.device, self.timer)
        give_back()
        self.rate = matrix_rate(self.device, self.dtype, self.timer)
        self.capture_seconds: dict[str, float] = {}
        self.milliseconds: dict[str, float] = {}
        self.failed: list[str] = []

    @property
    def _exact_paths(self) -> list[str]:
        return [path for path in self.paths if path != "int8"]

    def attempt(self, step: str, work: Callable[[], Any]) -> None:
        """`work()`; where it does not fit the device's memory, one line says so, and the bench goes on."""
        try:
            work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = benching.first_line(error)
        else:
            return
        # Outside of the handler: the error's frames hold what was made on the way.
        give_back()
        self.failed.append(step)
        print(f"{step}: does not fit the memory of {self.device}: {said}", file=sys.stderr)

    def add(self, step: str, bytes_moved: int, times: dict[str, float], limit_ms: float | None = None) -> None:
        if not times:
            return
        limit = bytes_moved / self.bandwidth * 1e3 if limit_ms is None else limit_ms
        row: dict[str, Any] = {"step": step, **times, "limit": limit}
        if exact := [ms for path, ms in times.items() if path != "int8"]:
            row["ratio"] = min(exact) / limit
        self.rows.append(row)

    def draft(self, shape: str) -> None:
        config = named_config(shape)
        times: dict[str, float] = {}
        for path in self._exact_paths:
            self.attempt(f"{shape} draft, {path}", partial(self._draft, config, path, times))
        moved = step_bytes(config, LayerRange(0, config.num_hidden_layers), self.dtype, self.context)
        self.add(f"{shape} draft, one token", moved, times)

    def _draft(self, config: Any, path: str, times: dict[str, float]) -> None:
        part = self._draft_model(config)
        start = time.perf_counter()
        drafter, cache = self._drafter(part, path)
        self.timer.synchronise()
        self.capture_seconds[f"draft {path}"] = time.perf_counter() - start
        propose = self._proposing(drafter, config)
        propose(limit=1)
        times[path] = (
            self.timer.milliseconds(partial(propose, limit=1))
            if isinstance(drafter, ModelDrafter)
            else self._draft_steps(drafter._steps[0], cache, drafter)
        )
        block = self.timer.milliseconds(partial(propose, limit=_DRAFT_LENGTH), warmups=1)
        self.milliseconds[f"draft block of {_DRAFT_LENGTH}, {path}"] = block

    def _draft_model(self, config: Any) -> ModelSlice:
        part = random_slice(config, LayerRange(0, config.num_hidden_layers), dtype=self.dtype, device=self.device)
        part.prepare(cache_positions(self.context))
        return part

    def _drafter(self, part: ModelSlice, path: str) -> tuple[Any, KvCache]:
        cache = part.make_cache(slots=1, capacity=cache_positions(self.context))
        static = make_static(part, cache, path, max_rows=limits.PREFILL_CHUNK_ROWS, is_draft=True)
        if static is None:
            return ModelDrafter(part, cache, part.shape.vocabulary), cache
        return GraphDrafter(static, part.shape.vocabulary), cache

    def _proposing(self, drafter: Any, config: Any) -> Callable[..., Any]:
        return partial(drafter.propose, 0, self._prompt(config), min_probability=0.0, sampling=Sampling())

    def profile(self, shape: str, file: Path) -> list[str]:
        """A trace of blocks of a draft that is warm, by the last path, into `file`; lines of the largest kernels."""
        config = named_config(shape)
        drafter, _ = self._drafter(self._draft_model(config), self._exact_paths[-1])
        propose = partial(self._proposing(drafter, config), limit=_DRAFT_LENGTH)

        def blocks() -> None:
            for _ in range(_TRACED_BLOCKS):
                propose()
            self.timer.synchronise()

        blocks()
        return benching.profile(file, self.device, blocks)

    def _prompt(self, config: Any) -> list[int]:
        return [7 * index % config.vocab_size for index in range(self.context - _ROOM)]

    def _draft_steps(self, step: Any, cache: Any, drafter: Any) -> float:
        times = []
        for _ in range(self.timer._repeats):
            cache.positions.fill_(self.context - _ROOM)
            drafter._step.zero_()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(16):
                step.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 16)
        return statistics.median(times)

    def target(self, shape: str, layers: LayerRange, lengths: tuple[int, ...], name: str) -> None:
        config = named_config(shape)
        times: dict[int, dict[str, float]] = {rows: {} for rows in lengths}
        for path in self.paths:
            self.attempt(f"{name}, {path}", partial(self._target, config, layers, name, path, times))
        moved = step_bytes(config, layers, self.dtype, self.context)
        for rows in lengths:
            self.add(f"{name}, {rows} tokens", moved, times[rows])

    def _target(
        self, config: Any, layers: LayerRange, name: str, path: str, times: dict[int, dict[str, float]]
    ) -> None:
        part = random_slice(config, layers, dtype=self.dtype, device=self.device)
        if path == "int8":
            for layer in part.layers:
                quantise_layer(layer)
        capacity = cache_positions(self.context)
        part.prepare(capacity)
        cache = part.make_cache(slots=1, capacity=capacity)
        static = make_static(part, cache, "fused" if path == "int8" else path, max_rows=max(*BUCKETS, 128))
        start = time.perf_counter()
        runner: Any = EagerRunner(part, cache) if static is None else GraphRunner(static)
        self.timer.synchronise()
        self.capture_seconds[f"{name} {path}"] = time.perf_counter() - start
        # The context is taken as it is found, and on the CPU that is whatever the memory held before.
        cache.keys.zero_()
        cache.values.zero_()
        cache.lengths[0] = self.context - _ROOM
        cache.positions.fill_(self.context - _ROOM)
        for rows, found in times.items():
            inputs = self._inputs(part, rows)
            if part.is_last:
                judge = partial(runner.verify, 0, inputs, [0] * (rows - 1), 0, Sampling())
                found[path] = self.timer.milliseconds(judge)
            else:
                found[path] = self.timer.device_milliseconds(partial(runner.forward, 0, inputs))

    def prefill(self, shape: str, layers: LayerRange) -> None:
        """By the last path, in chunks of each of `_PREFILL_CHUNKS`."""
        config = named_config(shape)
        part = random_slice(config, layers, dtype=self.dtype, device=self.device)
        tokens = min(_PREFILL_TOKENS, self.context * 2)
        part.prepare(cache_positions(tokens))
        weights = part.byte_count / self.dtype.itemsize
        # Scores and sums of a causal half: 2 products of width heads * dim for each pair.
        pairs = tokens * tokens / 2 * 4 * part.shape.heads * part.shape.head_dim * len(part.range)
        limit_ms = (2 * weights * tokens + pairs) / self.rate * 1e3
        path = self._exact_paths[-1]

        def one(step: str, chunk: int) -> None:
            self.add(step, 0, {path: self._prefill(part, path, tokens, chunk)}, limit_ms=limit_ms)

        for chunk in _PREFILL_CHUNKS:
            step = f"prefill {tokens} tokens by {chunk}"
            self.attempt(step, partial(one, step, chunk))

    def _prefill(self, part: ModelSlice, path: str, tokens: int, chunk: int) -> float:
        """Milliseconds for `tokens` in pieces of `chunk` rows, each in the smallest graph that takes it."""
        cache = part.make_cache(slots=1, capacity=cache_positions(tokens))
        rows = max(chunk, limits.PREFILL_CHUNK_ROWS)
        static = make_static(part, cache, path, max_rows=rows)
        runner: Any
        if static is None:
            runner = EagerRunner(part, cache)
        else:
            runner = GraphRunner(static, buckets=(1,), prefill_buckets=(rows,))
        inputs = self._inputs(part, tokens)

        def work() -> None:
            for start in range(0, tokens, chunk):
                cache.lengths[0] = start
                cache.positions.fill_(start)
                runner.forward(0, inputs[start : start + chunk])

        return self.timer.device_milliseconds(work, inner=1)

    def _inputs(self, part: ModelSlice, rows: int) -> torch.Tensor:
        if part.is_first:
            return torch.arange(rows, device=self.device) * 7 % part.shape.vocabulary
        return torch.randn(rows, part.shape.width, device=self.device).to(self.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", default="float16" if default == "cuda" else "float32", choices=tuple(DTYPES))
    parser.add_argument("--shape", default="qwen2.5-7b" if default == "cuda" else "qwen2.5-tiny", choices=NAMES)
    parser.add_argument("--draft-shape", default="qwen2.5-0.5b" if default == "cuda" else "qwen2.5-tiny", choices=NAMES)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="without it, those that run on the device")
    parser.add_argument("--json", action="store_true", help="figures instead of the table")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of blocks of draft steps")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[torch.device, list[str]]:
    """The device, and the paths that run there. Ends with the option's name where it makes no sense, before anything is
    measured."""
    benching.check_context(parser, options.context, least=_ROOM + 1, shapes=(options.shape, options.draft_shape))
    benching.check_repeats(parser, options.repeats)
    device = benching.use_device(parser, options.device)
    paths = [path for path in PATHS if _works(path, device)]
    if options.paths is not None:
        if lacking := [path for path in PATHS if path in options.paths and path not in paths]:
            print(f"not on {options.device}: {', '.join(lacking)}", file=sys.stderr)
        paths = [path for path in paths if path in options.paths]
    if not set(paths) - {"int8"}:
        parser.error(f"argument --paths: one of eager, graph and fused that runs on {options.device} is needed")
    if options.profile is not None:
        try:
            options.profile.open("ab").close()
        except OSError as error:
            parser.error(f"argument --profile: {options.profile} cannot be written: {error.strerror}")
    return device, paths


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a step did not fit the device, and as `benching.run` has it."""
    return benching.run(_PROGRAM, partial(_main, arguments))


def _main(arguments: list[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    device, paths = _check(parser, options)
    with torch.inference_mode():
        bench = Bench(device, paths, options)
        _measure(bench, options)
        report(bench, options)
        if options.profile is not None:
            bench.attempt("profile", partial(_profile, bench, options))
    return benching.EXIT_FAILED if bench.failed else 0


def _measure(bench: Bench, options: argparse.Namespace) -> None:
    count = named_config(options.shape).num_hidden_layers
    half = count // 2
    middle, last = LayerRange(half // 2, half // 2 + half), LayerRange(half, count)
    bench.draft(options.draft_shape)
    bench.target(options.shape, middle, (1, 9, 65), f"half {options.shape}")
    bench.target(options.shape, last, (1, 9, 65), "last half, with verdict")
    bench.attempt("prefill", partial(bench.prefill, options.shape, middle))


def _profile(bench: Bench, options: argparse.Namespace) -> None:
    for line in bench.profile(options.draft_shape, options.profile):
        # JSON has standard output to itself.
        print(line, file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
