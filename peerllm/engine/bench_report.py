"""What the bench of steps prints: a table, or one object of JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peerllm.engine.bench import Bench

PATHS = ("eager", "graph", "fused", "int8")
"""`int8` is the fused path with int8 weights; its limit is half the others', and the ratio is not about it."""


def report(bench: Bench, options: argparse.Namespace) -> None:
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
        found = {"rows": bench.rows, "ms": bench.milliseconds, "seconds": bench.capture_seconds, "failed": bench.failed}
        print(json.dumps({**facts, **found}), flush=True)
        return
    said = (f"{name} {_digits(value)}" if isinstance(value, float) else f"{value}" for name, value in facts.items())
    print("  ".join(said))
    print(table(bench.rows))
    for name, ms in bench.milliseconds.items():
        print(f"{name}: {ms:.2f} ms")
    for name, seconds in bench.capture_seconds.items():
        print(f"compiling and capturing, {name}: {seconds:.2f} s")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'step':38s}" + "".join(f"{name:>9s}" for name in (*PATHS, "limit", "ratio"))]
    for row in rows:
        cells = "".join(f"{row[name]:9.3f}" if name in row else f"{'—':>9s}" for name in (*PATHS, "limit"))
        ratio = f"{row['ratio']:9.2f}" if "ratio" in row else f"{'—':>9s}"
        lines.append(f"{row['step']:38s}{cells}{ratio}")
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Three at least."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
