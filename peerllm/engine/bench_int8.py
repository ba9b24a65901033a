"""Which tiling of an int8 product is fastest here: `python3 -m peerllm.engine.bench_int8`.

Every product of a layer of a named shape is timed over many tilings, compiled beforehand by several processes; then
half of the model is timed with the best of them, against float16. Prints lines as it goes, so that one cut short has
told what it found, and at the end the table for `fused.tilings`. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from peerllm.engine import benching
from peerllm.engine.bench import Timer
from peerllm.engine.fused.tilings import TILINGS_INT8, Tiling, int8_tiling, parts_for
from peerllm.engine.plans import cache_positions
from peerllm.engine.shapes import NAMES, named_config, random_slice
from peerllm.engine.slice import SliceShape
from peerllm.protocol.identity import LayerRange

_PROGRAM = "python3 -m peerllm.engine.bench_int8"
_CACHE_BYTES = 256 << 20
"""Weights that are rotated through, so that none is still in the L2 cache when its turn comes again."""
_ROWS = {16: 9, 128: 65}
"""Rows of a tile to the rows of the block that is timed with it."""
_NARROW = (
    (32, 256, 2, 5), (32, 256, 4, 4), (32, 512, 4, 3),
    (64, 128, 2, 6), (64, 128, 4, 5), (64, 256, 2, 4), (64, 256, 4, 4), (64, 256, 4, 6),
    (128, 128, 4, 4), (128, 128, 4, 6), (128, 128, 8, 5), (128, 256, 4, 3), (128, 256, 8, 4),
)  # fmt: skip
_WIDE = ((64, 128, 4, 4), (64, 128, 8, 3), (128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 8, 5))
_WIDE_GATED = ((32, 128, 8, 4), (64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 8, 5), (64, 128, 4, 3))
"""Columns and depth of a tile, warps, stages."""
_ROOM = 64
"""Positions that half of the model has left."""
_COMPILERS = 8
_COMPILE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Product:
    name: str
    columns: int
    depth: int
    is_gated: bool

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.columns * (2 if self.is_gated else 1)

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.depth


def products(shape: SliceShape) -> list[Product]:
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return [
        Product("gate and up", shape.intermediate, shape.width, True),
        Product("down", shape.width, shape.intermediate, False),
        Product("qkv", qkv, shape.width, False),
        Product("output", shape.width, shape.heads * shape.head_dim, False),
    ]


def candidates(product: Product, tile: int) -> Iterator[Tiling]:
    """Without those whose depth does not come out even: a mask there costs more than it could gain."""
    choices = _NARROW if tile == 16 else _WIDE_GATED if product.is_gated else _WIDE
    found = [int8_tiling(product.columns, product.depth, tile, is_gated=product.is_gated)]
    for block_n, block_k, warps, stages in choices:
        if product.depth % block_k:
            continue
        programs = (1,) if product.is_gated else (132, 264, 528) if tile == 16 else (132, 264)
        parts = {parts_for(product.columns, product.depth, block_n, each) for each in programs}
        found += [Tiling(block_n, block_k, warps, stages, parts=1 if product.is_gated else each) for each in parts]
    yield from dict.fromkeys(found)


class Bench:
    """Buffers for one product at a time."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.timer = Timer(device, repeats)

    def launch(self, product: Product, tile: int, tiling: Tiling, buffers: dict[str, torch.Tensor], w: Any) -> None:
        from peerllm.engine.fused.int8_matmul import int8_matmul

        blocks = -(-buffers["out"].shape[1] // tiling.block_n)
        int8_matmul[(blocks, tiling.parts)](
            buffers["planes"], buffers["steps"], w, buffers["scales"], None,
            None if product.is_gated else buffers["sums"],
            buffers["out"], buffers["partial"], buffers["arrived"], buffers["planes"].shape[1],
            _ROWS[tile], buffers["out"].shape[1],
            K=product.depth, BLOCK_M=tile, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SUMS_STRIDE=1024,
            PARTS=tiling.parts, PLANES=2, HAS_BIAS=False, HAS_RESIDUAL=not product.is_gated,
            IS_GATED=product.is_gated, IS_DEPENDENT=False, num_warps=tiling.warps, num_stages=tiling.stages,
            launch_pdl=False,
        )  # fmt: skip

    def buffers(self, product: Product, columns: int) -> dict[str, torch.Tensor]:
        def zeros(*size: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=of, device=self.device)

        planes = torch.randint(-127, 128, (2, 128 * product.depth), dtype=torch.int8, device=self.device)
        return {
            "planes": planes,
            "steps": zeros(128) + 1e-4,
            "scales": zeros(2 * columns) + 1e-3,
            "sums": zeros(128, 1024),
            "out": zeros(128, columns, of=torch.float16),
            "partial": zeros(8 * 128, columns + 128),
            "arrived": zeros(max(columns, 16), of=torch.int32),
        }

    def expected(self, product: Product, tile: int, buffers: dict[str, torch.Tensor], w: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, columns]`, from what the kernel is given."""
        rows = _ROWS[tile]
        low, high = buffers["planes"].view(2, 128, product.depth)[:, :rows].double()
        sums = (high * 256 + low) @ w.double().t() * 1e-7
        if not product.is_gated:
            return sums.float()
        gate, up = sums.float().half().float().chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def best(self, product: Product, tile: int) -> Tiling:
        copies = -(-_CACHE_BYTES // product.weight_bytes) + 1
        size = (product.rows, product.depth)
        weights = [torch.randint(-127, 128, size, dtype=torch.int8, device=self.device) for _ in range(copies)]
        buffers = self.buffers(product, product.columns)
        expected = self.expected(product, tile, buffers, weights[0])
        found: dict[Tiling, float] = {}
        for tiling in candidates(product, tile):
            try:
                buffers["out"].zero_()
                self.launch(product, tile, tiling, buffers, weights[0])
                difference = float(
                    (buffers["out"][: _ROWS[tile]].float() - expected).abs().max() / expected.abs().max()
                )
                if not difference < 5e-3:
                    print(f"WRONG by {difference:.3g}: {product.name}, {tile} rows, {tiling}", flush=True)
                    continue
                found[tiling] = self._microseconds(product, tile, tiling, buffers, weights)
            except Exception as error:  # a tiling that does not fit the device: Triton's errors are of many kinds
                print(f"{product.name}, {tile} rows, {tiling}: {type(error).__name__}: {error}"[:200], flush=True)
        ordered = sorted(found, key=lambda each: found[each])
        for tiling in ordered[:3]:
            rate = product.weight_bytes / found[tiling] / 1e3
            print(
                f"{product.name:12s} {_ROWS[tile]:3d} rows {found[tiling]:7.2f} us {rate:6.0f} GB/s  {tiling}",
                flush=True,
            )
        # Where none ran, what is used without a measurement.
        return ordered[0] if ordered else int8_tiling(product.columns, product.depth, tile, is_gated=product.is_gated)

    def _microseconds(
        self, product: Product, tile: int, tiling: Tiling, buffers: dict[str, torch.Tensor], weights: list[torch.Tensor]
    ) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for w in weights:
                self.launch(product, tile, tiling, buffers, w)
        return self.timer.device_milliseconds(graph.replay, inner=2) * 1e3 / len(weights)

    def compile(self, product: Product, tile: int, tiling: Tiling) -> None:
        """By a launch on a weight of one block: the number of columns is no constant of the kernel."""
        columns = tiling.block_n
        buffers = self.buffers(product, columns)
        w = torch.zeros(columns * (2 if product.is_gated else 1), product.depth, dtype=torch.int8, device=self.device)
        self.launch(product, tile, tiling, buffers, w)


def half_model(shape: str, device: torch.device, context: int, repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of blocks of 1, 9 and 65 rows through the middle half, by kernel."""
    from peerllm.engine.fused.layers import FusedSlice
    from peerllm.engine.int8 import quantise_layer
    from peerllm.engine.runner import GraphRunner

    config = named_config(shape)
    half = config.num_hidden_layers // 2
    layers = LayerRange(half // 2, half // 2 + half)
    timer = Timer(device, repeats)
    found: dict[str, dict[int, float]] = {}
    rows: dict[str, torch.Tensor] = {}
    inputs = torch.randn(65, config.hidden_size, device=device).half()
    for kernel in ("float16", "int8"):
        part = random_slice(config, layers, dtype=torch.float16, device=device)
        if kernel != "float16":
            for layer in part.layers:
                quantise_layer(layer)
        capacity = cache_positions(context)
        part.prepare(capacity)
        cache = part.make_cache(slots=1, capacity=capacity)
        static = FusedSlice(part, cache, max_rows=128)
        runner = GraphRunner(static, buckets=(1, 9, 65), prefill_buckets=())
        cache.lengths[0] = context - _ROOM
        cache.positions.fill_(context - _ROOM)
        found[kernel] = {}
        for count in (1, 9, 65):
            found[kernel][count] = timer.device_milliseconds(partial(runner.forward, 0, inputs[:count]))
        rows[kernel] = runner.forward(0, inputs[:9]).float().clone()
        alone = runner.forward(0, inputs[:1]).float()
        is_same = bool(torch.equal(rows[kernel][:1], alone))
        away = float((rows[kernel] - rows["float16"]).norm() / rows["float16"].norm())
        print(
            f"half of {shape}, {kernel}: "
            + ", ".join(f"{count} rows {ms:.3f} ms" for count, ms in found[kernel].items())
            + f"; row 0 of 9 {'is' if is_same else 'IS NOT'} what it is alone; {away:.2e} from float16",
            flush=True,
        )
        del runner, static, cache, part
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit status, as `benching.run` has it."""
    return benching.run(_PROGRAM, partial(_main, arguments))


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=NAMES)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--stage", default="all", choices=("all", "compile", "time"), help="compile alone, or time alone"
    )
    parser.add_argument("--compiler", type=int, choices=range(_COMPILERS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    benching.check_context(parser, options.context, least=_ROOM + 1, shapes=(options.shape,))
    benching.check_repeats(parser, options.repeats)
    device = benching.use_device(parser, options.device, gpu_for="these kernels need a GPU")
    with torch.inference_mode():
        _measure(Bench(device, options.repeats), options)
    return 0


def _measure(bench: Bench, options: argparse.Namespace) -> None:
    shape = SliceShape.of(named_config(options.shape))
    work = [(each, tile) for tile in _ROWS for each in products(shape)]
    if options.compiler is not None:
        every = [(product, tile, tiling) for product, tile in work for tiling in candidates(product, tile)]
        for product, tile, tiling in every[options.compiler :: _COMPILERS]:
            bench.compile(product, tile, tiling)
        torch.cuda.synchronize(bench.device)
        return
    began = time.monotonic()
    if options.stage != "time":
        _compile_all(options)
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
    if options.stage == "compile":
        return
    best = {}
    for product, tile in work:
        best[product.columns, product.depth, product.is_gated, tile] = bench.best(product, tile)
    TILINGS_INT8.update(best)
    print(f"tuned after {time.monotonic() - began:.1f} s", flush=True)
    for key, tiling in best.items():
        print(f"    {key}: {tiling},", flush=True)
    milliseconds = half_model(options.shape, bench.device, options.context, options.repeats)
    print(json.dumps({"milliseconds": milliseconds}), flush=True)


def _compile_all(options: argparse.Namespace) -> None:
    """Into Triton's cache on disk, by processes beside each other. One that fails says so, and its share is compiled
    when its turn comes."""
    command = [sys.executable, "-m", "peerllm.engine.bench_int8", "--device", options.device, "--shape", options.shape]
    # In a group of their own: Ctrl-C on a terminal is this process's, which ends them.
    running = [
        subprocess.Popen(
            [*command, "--compiler", str(index)], env={**os.environ, "OMP_NUM_THREADS": "1"}, process_group=0
        )
        for index in range(_COMPILERS)
    ]
    deadline = time.monotonic() + _COMPILE_SECONDS
    try:
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in running:
            process.kill()
    for process in running:
        if code := process.wait():
            print(f"a compiler ended with {code}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
