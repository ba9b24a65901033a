"""What a half takes of a GPU, beside what the plan says: `python3 -m peerllm.engine.bench_memory`.

Planted models of named shapes. Each case is a process of its own that loads the half and its draft as a peer does,
fills every sequence to its end and runs blocks of every kind. What the device has less by then is what was taken;
CUDA's own context comes before the plan looks at what is free, and is told apart. Needs a GPU that nothing else uses
meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peerllm.engine import benching, codec, memory
from peerllm.engine.engine import Engine
from peerllm.engine.plans import Plan
from peerllm.engine.planting import DRAFT, TARGET, write_pair
from peerllm.engine.shapes import NAMES, named_config
from peerllm.protocol import limits
from peerllm.protocol.identity import INT8, UNQUANTISED, share_layers
from peerllm.protocol.requests import Sampling

_PROGRAM = "python3 -m peerllm.engine.bench_memory"
_CODEC = "int8"
_CUT = Sampling(temperature=1.0, seed=3, top_k=200, top_p=0.9)
_FREE = Sampling(temperature=1.0, seed=3)
_MIB = limits.MIB


@dataclass(frozen=True, slots=True)
class Case:
    """A half of the model on one device."""

    is_first: bool
    """It has the embedding and the draft; otherwise the head."""
    path: str
    weights: str
    slots: int

    def words(self) -> str:
        which = "first half and draft" if self.is_first else "last half"
        return f"{which}, {self.path}, {'int8' if self.weights == INT8 else 'whole'} weights, {self.slots} sequences"


CASES = (
    Case(True, "fused", UNQUANTISED, 1),
    Case(True, "fused", UNQUANTISED, 2),
    Case(False, "fused", UNQUANTISED, 2),
    Case(True, "fused", INT8, 2),
    Case(False, "fused", INT8, 2),
    Case(True, "graph", UNQUANTISED, 2),
    Case(False, "graph", UNQUANTISED, 2),
    Case(False, "graph", INT8, 2),
)


class Holder:
    """A case as a peer holds it: planned and loaded from planted models, then used."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self._case, self._context, self._dtype = case, options.context, options.dtype
        self._folder = Path(options.folder)
        config = named_config(options.shape)
        self._width = config.hidden_size
        first, last = share_layers(config.num_hidden_layers, [None, None], [1, 1])
        self._layers = first if case.is_first else last
        self._held: dict[str, Any] = {
            "dtype": options.dtype,
            "devices": (options.device,),
            "draft": f"model:{self._folder / DRAFT}" if case.is_first else "none",
            "weights": case.weights,
            "slots": case.slots,
            "path": case.path,
            "context": options.context,
        }

    def plan(self) -> Plan:
        """As before a load."""
        found = memory.plan_load(self._folder / TARGET, self._layers, **self._held)
        return found.devices[0][1]

    def load(self) -> Engine:
        return Engine.load(self._folder / TARGET, self._layers, wire_codec=_CODEC, **self._held)

    def use(self, engine: Engine) -> None:
        """Every sequence up to its end, and blocks with and without top-k and top-p at its end."""
        for slot in range(self._case.slots):
            for sampling in (_CUT, _FREE):
                engine.open(slot, sampling)
                self._fill(engine, slot)
                self._block(engine, slot)
            engine.close(slot)

    def _fill(self, engine: Engine, slot: int) -> None:
        chunk = limits.PREFILL_CHUNK_ROWS
        for start in range(0, self._context - limits.MAX_CANDIDATES - 1, chunk):
            rows = min(chunk, self._context - limits.MAX_CANDIDATES - 1 - start)
            if self._case.is_first:
                engine.prefill(slot, start, tokens=[5] * rows)
            else:
                engine.prefill(slot, start, rows=rows, payload=self._payload(rows))

    def _block(self, engine: Engine, slot: int) -> None:
        start = self._context - limits.MAX_CANDIDATES - 1
        for count in (1, 8, limits.MAX_CANDIDATES):
            if self._case.is_first:
                engine.draft_block(slot, start, [5], count)
            else:
                engine.verify(slot, start, [5] * count, self._payload(count + 1))

    def _payload(self, rows: int) -> bytes:
        hidden = torch.ones(rows, self._width, dtype=codec.DTYPES[self._dtype])
        return codec.encode(hidden, _CODEC)


def hold(case: Case, options: argparse.Namespace) -> None:
    """One case, in its own process: prints what it planned and what the allocator counts, and stays until its standard
    input ends."""
    device = torch.device(options.device)
    before = memory.free_memory(device)
    holder = Holder(case, options)
    plan = holder.plan()
    engine = holder.load()
    holder.use(engine)
    gc.collect()
    found = {"planned": plan.total}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found |= {
            "taken": before - memory.free_memory(device),
            "reserved": torch.cuda.memory_reserved(device),
            "most_reserved": torch.cuda.max_memory_reserved(device),
            "allocated": torch.cuda.memory_allocated(device),
        }
    print(json.dumps(found), flush=True)
    sys.stdin.read()


def measure(index: int, arguments: list[str], device: torch.device) -> dict[str, int]:
    """Bytes of one case: what `hold` prints, and CUDA's `context`."""
    before = memory.free_memory(device)
    command = [sys.executable, "-m", "peerllm.engine.bench_memory", *arguments, "--case", str(index)]
    # In a group of its own: Ctrl-C on a terminal is this process's, and the other's standard input ends.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            line = process.stdout.readline()
        except BaseException:
            process.kill()
            raise
        found: dict[str, int] = json.loads(line) if line else {}
        found["context"] = before - memory.free_memory(device) - found.get("taken", 0)
        process.stdin.close()
    if process.returncode or not line:
        raise RuntimeError(f"it ended with {process.returncode}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a case failed, and as `benching.run` has it."""
    return benching.run(_PROGRAM, partial(_main, arguments))


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=tuple(codec.DTYPES))
    parser.add_argument("--shape", default="qwen2.5-7b", choices=NAMES)
    parser.add_argument("--draft-shape", default="qwen2.5-0.5b", choices=NAMES)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="a line of figures for each case, in bytes")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    shapes = (options.shape, options.draft_shape)
    benching.check_context(parser, options.context, least=2 * limits.MAX_CANDIDATES, shapes=shapes)
    device = benching.use_device(parser, options.device, gpu_for="memory is counted on a GPU")
    if options.case is not None:
        if options.folder is None:
            parser.error("argument --case: --folder is needed with it")
        hold(CASES[options.case], options)
        return 0
    with tempfile.TemporaryDirectory(prefix="peerllm-memory-") as folder:
        options.folder = folder
        write_pair(Path(folder), options.shape, options.draft_shape, (0.9,), options.dtype)
        return 1 if _measure_all(options, device) else 0


def _measure_all(options: argparse.Namespace, device: torch.device) -> bool:
    """Whether a case failed."""
    passed = [f"--{name.replace('_', '-')}={getattr(options, name)}"
              for name in ("device", "dtype", "shape", "draft_shape", "context", "folder")]  # fmt: skip
    failed = False
    for index, case in enumerate(CASES):
        try:
            found = measure(index, passed, device)
        except RuntimeError as error:
            print(f"{case.words()}: {error}", file=sys.stderr)
            failed = True
            continue
        if options.json:
            print(json.dumps({"case": case.words(), **found}), flush=True)
        else:
            listed = ", ".join(f"{name} {size // _MIB}" for name, size in found.items())
            print(f"{case.words()}, MiB: {listed}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
