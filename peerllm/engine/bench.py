"""How fast the engine's steps are, against what memory allows: `python3 -m peerllm.engine.bench`.

Random weights of a named shape. The limit of a step is its bytes (weights, and the keys and values of the context) over
the copy bandwidth that is measured in the same run. Needs torch and transformers alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peerllm.engine import fused
from peerllm.engine.codec import DTYPES
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.engine.int8 import quantise_layer
from peerllm.engine.runner import BUCKETS, EagerRunner, GraphRunner
from peerllm.engine.running import make_static
from peerllm.engine.shapes import NAMES, named_config, random_slice
from peerllm.engine.slice import ModelSlice
from peerllm.protocol import limits
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling

_PATHS = ("eager", "graph", "fused", "int8")
"""`int8` is the fused path with int8 weights; its limit is half the others', and the ratio is not about it."""
_PREFILL_TOKENS = 2048
_PREFILL_CHUNKS = (512, 128, 68)
"""Rows. The last is what daemons send at 7B's width in int8: as many as fill a slice of the link."""
_DRAFT_LENGTH = 8
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


def copy_bandwidth(device: torch.device, timer: Timer) -> float:
    """Bytes a second of a device-to-device copy, read and written bytes both counted."""
    size = (4 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = timer.device_milliseconds(lambda: target.copy_(source), inner=3) / 1e3
    return 2 * size / seconds


def matrix_rate(device: torch.device, dtype: torch.dtype, timer: Timer) -> float:
    """Floating-point operations a second of a large product of random matrices."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (timer.device_milliseconds(lambda: torch.mm(a, b), inner=5) / 1e3)


def step_bytes(part: ModelSlice, context: int, *, with_embedding: bool = False) -> int:
    """What one block has to read: every weight once (of an embedding, only rows) and the context's keys and values."""
    weights = part.byte_count
    if part.embed is not None and not with_embedding and not (part.head is not None and part.shape.is_tied):
        weights -= part.embed.weight.numel() * part.embed.weight.element_size()
    element = torch.tensor([], dtype=part.dtype).element_size()
    return weights + 2 * len(part.range) * part.shape.kv_heads * part.shape.head_dim * context * element


def _works(path: str, device: torch.device) -> bool:
    if path == "eager":
        return True
    return device.type == "cuda" and (path == "graph" or fused.is_available(device))


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = DTYPES[options.dtype]
        self.context = options.context
        self.timer = Timer(self.device, options.repeats)
        self.paths = [each for each in _PATHS if each in options.paths and _works(each, self.device)]
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = copy_bandwidth(self.device, self.timer)
        self.rate = matrix_rate(self.device, self.dtype, self.timer)
        self.capture_seconds: dict[str, float] = {}
        self.milliseconds: dict[str, float] = {}

    @property
    def _exact_paths(self) -> list[str]:
        return [path for path in self.paths if path != "int8"]

    def add(self, step: str, bytes_moved: int, times: dict[str, float], limit_ms: float | None = None) -> None:
        limit = bytes_moved / self.bandwidth * 1e3 if limit_ms is None else limit_ms
        best = min(ms for path, ms in times.items() if path != "int8")
        self.rows.append({"step": step, **times, "limit": limit, "ratio": best / limit})

    def draft(self, shape: str) -> None:
        config = named_config(shape)
        times = {}
        for path in self._exact_paths:
            part = random_slice(config, LayerRange(0, config.num_hidden_layers), dtype=self.dtype, device=self.device)
            part.prepare(self.context + limits.MAX_CANDIDATES + 1)
            cache = part.make_cache(slots=1, capacity=self.context + limits.MAX_CANDIDATES + 1)
            start = time.perf_counter()
            static = make_static(part, cache, path, max_rows=limits.PREFILL_CHUNK_ROWS, is_draft=True)
            drafter: Any
            if static is None:
                drafter = ModelDrafter(part, cache, config.vocab_size)
            else:
                drafter = GraphDrafter(static, config.vocab_size)
            self.timer.synchronise()
            self.capture_seconds[f"draft {path}"] = time.perf_counter() - start
            propose = partial(drafter.propose, 0, self._prompt(config), min_probability=0.0, sampling=Sampling())
            propose(limit=1)
            times[path] = (
                self.timer.milliseconds(partial(propose, limit=1))
                if static is None
                else self._draft_steps(drafter._steps[0], cache, drafter)
            )
            block = self.timer.milliseconds(partial(propose, limit=_DRAFT_LENGTH), warmups=1)
            self.milliseconds[f"draft block of {_DRAFT_LENGTH}, {path}"] = block
            del drafter, static, cache, part
        self.add(f"{shape} draft, one token", step_bytes_of(config, self.dtype, self.context), times)

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
        moved = 0
        for path in self.paths:
            part = random_slice(config, layers, dtype=self.dtype, device=self.device)
            moved = step_bytes(part, self.context)
            if path == "int8":
                for layer in part.layers:
                    quantise_layer(layer)
            capacity = self.context + limits.MAX_CANDIDATES + 1
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
            for rows in lengths:
                inputs = self._inputs(part, rows)
                if part.is_last:
                    candidates = [0] * (rows - 1)
                    judge = partial(runner.verify, 0, inputs, candidates, 0, Sampling())
                    times[rows][path] = self.timer.milliseconds(judge)
                else:
                    times[rows][path] = self.timer.device_milliseconds(partial(runner.forward, 0, inputs))
            del runner, static, cache, part
        for rows in lengths:
            self.add(f"{name}, {rows} tokens", moved, times[rows])

    def prefill(self, shape: str, layers: LayerRange) -> None:
        config = named_config(shape)
        part = random_slice(config, layers, dtype=self.dtype, device=self.device)
        tokens = min(_PREFILL_TOKENS, self.context * 2)
        part.prepare(tokens + limits.MAX_CANDIDATES + 1)
        weights = part.byte_count / torch.tensor([], dtype=self.dtype).element_size()
        # Scores and sums of a causal half: 2 products of width heads * dim for each pair.
        pairs = tokens * tokens / 2 * 4 * part.shape.heads * part.shape.head_dim * len(part.range)
        operations = 2 * weights * tokens + pairs
        path = self._exact_paths[-1]
        for chunk in _PREFILL_CHUNKS:
            ms = self._prefill(part, path, tokens, chunk)
            self.add(f"prefill {tokens} tokens by {chunk}", 0, {path: ms}, limit_ms=operations / self.rate * 1e3)

    def _prefill(self, part: ModelSlice, path: str, tokens: int, chunk: int) -> float:
        """Milliseconds for `tokens` in pieces of `chunk` rows, each in the smallest graph that takes it."""
        cache = part.make_cache(slots=1, capacity=tokens + limits.MAX_CANDIDATES + 1)
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


def step_bytes_of(config: Any, dtype: torch.dtype, context: int) -> int:
    """`step_bytes` of a whole model, without building it."""
    element = torch.tensor([], dtype=dtype).element_size()
    part = ModelSlice(config, LayerRange(0, config.num_hidden_layers))
    count = sum(each.numel() for each in part.parameters())
    if not part.shape.is_tied:
        count -= part.shape.vocabulary * part.shape.width
    keys = 2 * part.shape.layers * part.shape.kv_heads * part.shape.head_dim * context
    return (count + keys) * element


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'step':38s}" + "".join(f"{name:>9s}" for name in (*_PATHS, "limit", "ratio"))]
    for row in rows:
        cells = "".join(f"{row[name]:9.3f}" if name in row else f"{'—':>9s}" for name in (*_PATHS, "limit"))
        lines.append(f"{row['step']:38s}{cells}{row['ratio']:9.2f}")
    return "\n".join(lines)


def profile(path: Path, device: torch.device, work: Callable[[], Any]) -> list[str]:
    """Writes a trace of `work()` for chrome://tracing and Perfetto; gives lines of the ten largest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    is_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_gpu else [])
    with torch_profile(activities=kinds) as found:
        work()
    found.export_chrome_trace(str(path))
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    ordered = sorted(found.key_averages(), key=lambda each: -getattr(each, field))[:10]
    return [
        f"{getattr(each, field) / max(1, each.count):10.1f} us x {each.count:<6d} {each.key[:100]}" for each in ordered
    ]


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with the option's name where it makes no sense, before anything is measured."""
    if options.context <= _ROOM:
        parser.error(f"argument --context: more than {_ROOM} positions are needed")
    if options.repeats < 1:
        parser.error("argument --repeats: a number from 1 up")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"argument --device: {options.device!r} cannot be used: {str(error).splitlines()[0]}")
    device = torch.device(options.device)
    if not any(_works(path, device) for path in options.paths if path != "int8"):
        parser.error(f"argument --paths: one of eager, graph and fused that runs on {options.device} is needed")
    if options.profile is not None:
        try:
            options.profile.open("ab").close()
        except OSError as error:
            parser.error(f"argument --profile: {options.profile} cannot be written: {error.strerror}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m peerllm.engine.bench", description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", default="float16" if default == "cuda" else "float32", choices=tuple(DTYPES))
    parser.add_argument("--shape", default="qwen2.5-7b" if default == "cuda" else "qwen2.5-tiny", choices=NAMES)
    parser.add_argument("--draft-shape", default="qwen2.5-0.5b" if default == "cuda" else "qwen2.5-tiny", choices=NAMES)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--paths", nargs="+", default=list(_PATHS), choices=_PATHS)
    parser.add_argument("--json", action="store_true", help="figures instead of the table")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of draft steps")
    options = parser.parse_args(arguments)
    _check(parser, options)
    with torch.inference_mode():
        bench = Bench(options)
        count = named_config(options.shape).num_hidden_layers
        half = count // 2
        bench.draft(options.draft_shape)
        bench.target(options.shape, LayerRange(half // 2, half // 2 + half), (1, 9, 65), f"half {options.shape}")
        bench.target(options.shape, LayerRange(half, count), (1, 9, 65), "last half, with verdict")
        bench.prefill(options.shape, LayerRange(half // 2, half // 2 + half))
    device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"
    facts = {
        "device": device,
        "torch": torch.__version__,
        "dtype": options.dtype,
        "context": options.context,
        "copy_gb_s": bench.bandwidth / 1e9,
        "matrix_tflop_s": bench.rate / 1e12,
    }
    if options.json:
        print(json.dumps({**facts, "rows": bench.rows, "ms": bench.milliseconds, "seconds": bench.capture_seconds}))
    else:
        print(
            "  ".join(
                f"{name} {value:.0f}" if isinstance(value, float) else f"{value}" for name, value in facts.items()
            )
        )
        print(table(bench.rows))
        for name, ms in bench.milliseconds.items():
            print(f"{name}: {ms:.2f} ms")
        for name, seconds in bench.capture_seconds.items():
            print(f"compiling and capturing, {name}: {seconds:.2f} s")
    if options.profile is not None:
        with torch.inference_mode():
            bench.paths = bench._exact_paths[-1:]
            for line in profile(options.profile, bench.device, partial(bench.draft, options.draft_shape)):
                # JSON has standard output to itself.
                print(line, file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    main()
