"""What the engine's benches have in common: devices, contexts, traces, and one line for what goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from peerllm.engine.out_of_memory import is_out_of_memory
from peerllm.protocol.errors import PeerllmError

EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
"""128 and the signal's number, as a shell has it."""


def run(program: str, work: Callable[[], int]) -> int:
    """The exit status of `work()`, whose output is then written.

    One line on standard error, and 1, where memory runs out, where a file or the output cannot be written, and for a
    PeerllmError; 130 after Ctrl-C, 141 where the reader of the output went away. Other errors are bugs, and are raised.
    """
    try:
        status = work()
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        said, status = "interrupted", _EXIT_INTERRUPTED
    except BrokenPipeError:
        said, status = "nobody reads the output", _EXIT_BROKEN_PIPE
        _drop_output()
    except OSError as error:
        said, status = f"{error.filename or 'cannot write'}: {error.strerror or error}", EXIT_FAILED
        if error.filename is None:
            _drop_output()
    except PeerllmError as error:
        said, status = error.message, EXIT_FAILED
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said, status = f"memory ran out: {first_line(error)}", EXIT_FAILED
    print(f"{program}: {said}", file=sys.stderr)
    return status


def _drop_output() -> None:
    """What is left in the buffer would fail once more at the end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def use_device(parser: argparse.ArgumentParser, name: str, *, gpu_for: str | None = None) -> torch.device:
    """The CPU or the GPU that `--device` names, made the current one, where Triton's launches go. Ends with a usage
    error where it is another kind, or cannot be used.

    Args:
        gpu_for: why the CPU will not do, where it will not.
    """
    try:
        kind = torch.device(name).type
        if gpu_for is not None and kind != "cuda":
            parser.error(f"argument --device: {gpu_for}; got {name!r}")
        if kind not in ("cpu", "cuda"):
            parser.error(f"argument --device: cpu or a GPU of CUDA; got {name!r}")
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"argument --device: {name!r} cannot be used: {first_line(error)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def check_context(parser: argparse.ArgumentParser, context: int, *, least: int, shapes: Sequence[str]) -> None:
    """Ends with a usage error where named `shapes` were not made for so many positions, or they are below `least`."""
    from peerllm.engine.shapes import named_config

    most = min(named_config(shape).max_position_embeddings for shape in shapes)
    if context < least:
        parser.error(f"argument --context: {least} positions at least are needed")
    if context > most:
        parser.error(f"argument --context: {most} positions at most: the shape is made for no more")


def check_repeats(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Ends with a usage error where nothing would be timed."""
    if repeats < 1:
        parser.error("argument --repeats: a number from 1 up")


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
