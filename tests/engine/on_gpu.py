"""Builds, checks and times the engine on this machine's GPU: python3 -m tests.engine.on_gpu [build] [check] [time].

Needs torch, transformers and pytest alone. Each step is a process of its own, whose output goes on as it comes; with
`--out DIR` it is kept in files too. The exit status is 1 where a step failed.

    build   compiles every kernel and captures every graph of the shapes that are timed, and says the seconds
    check   the tests that need a GPU, against the modules
    time    the tables of steps, of int8 products, of choices, of memory, and of distillation
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
_PYTEST = (
    "-m",
    "pytest",
    "-s",
    "-v",
    "-c",
    "/dev/null",
    "--rootdir=.",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
)
STEPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "build": (("-m", "peerllm.engine.bench", "--paths", "fused", "int8", "--repeats", "1"),),
    "check": (
        (
            *_PYTEST,
            "tests/engine/test_gpu.py",
            "tests/engine/test_devices.py",
            "tests/engine/distill/test_gpu_distill.py",
        ),
    ),
    "time": (
        ("-m", "peerllm.engine.bench"),
        ("-m", "peerllm.engine.bench_int8", "--stage", "time"),
        ("-m", "peerllm.engine.bench_choice"),
        ("-m", "peerllm.engine.bench_memory"),
        ("-m", "peerllm.engine.distill.bench"),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.engine.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all of them without one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep each command's output in a file there")
    options = parser.parse_args(arguments)
    if unknown := [step for step in options.steps if step not in STEPS]:
        parser.error(f"{unknown[0]!r} is no step; they are {', '.join(STEPS)}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    failed = []
    for step in options.steps or STEPS:
        for number, command in enumerate(STEPS[step]):
            file = None if options.out is None else options.out / f"{step}-{number}.txt"
            clock = time.monotonic()
            status = _run(command, file)
            print(f"{step}: {' '.join(command)}: exit status {status}, {time.monotonic() - clock:.1f} s", flush=True)
            if status:
                failed.append(step)
    return 1 if failed else 0


def _run(command: tuple[str, ...], file: Path | None) -> int:
    kept = None if file is None else file.open("w")
    try:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if kept is not None:
                kept.write(line)
                kept.flush()
        return process.wait()
    finally:
        if kept is not None:
            kept.close()


if __name__ == "__main__":
    sys.exit(main())
