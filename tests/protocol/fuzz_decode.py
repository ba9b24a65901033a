"""The long fuzzing run, guided by coverage: `make fuzz` (needs `atheris`).

Fails on anything but a message or a ProtocolError, on an input that takes 10 ms where nothing is instrumented, and,
for every hundredth input, on more than 4 MiB allocated.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import tracemalloc

import atheris

with atheris.instrument_imports(include=["peerllm.protocol"]):
    from peerllm.protocol import cbor
    from peerllm.protocol.errors import ProtocolError
    from peerllm.protocol.messages import decode_message

MAX_SECONDS = 0.010
MAX_ALLOCATED = 4 * 1024 * 1024
SEEDS = (
    {"t": 3, "opener_layers": {"first": 0, "last": 15}, "joiner_layers": {"first": 15, "last": 30}, "dtype": "float32"},
    {"t": 19, "session": 1, "round": 7, "start": 90, "candidates": [5, 700, 70000], "hidden": bytes(60)},
    {"t": 32, "request": 9, "body": {"messages": [{"role": "user", "content": "Hi, 世界 😀"}], "stop": ["\n"]}},
)


class Counted:
    inputs = 0


def attempt(data: bytes) -> float:
    begun = time.thread_time()
    with contextlib.suppress(ProtocolError):
        decode_message(data)
    return time.thread_time() - begun


def seconds_elsewhere(data: bytes) -> float:
    """The best of ten in a process of its own, where nothing is instrumented."""
    timer = (
        "import sys, time\nfrom peerllm.protocol.messages import decode_message\n"
        "data, best = sys.stdin.buffer.read(), 9.0\n"
        "for _ in range(10):\n"
        "    begun = time.thread_time()\n"
        "    try: decode_message(data)\n"
        "    except Exception: pass\n"
        "    best = min(best, time.thread_time() - begun)\n"
        "print(best)"
    )
    result = subprocess.run([sys.executable, "-c", timer], input=data, capture_output=True, check=True, timeout=60)
    return float(result.stdout)


def one_input(data: bytes) -> None:
    Counted.inputs += 1
    if attempt(data) >= MAX_SECONDS:  # instrumented code is several times slower
        seconds = seconds_elsewhere(data)
        if seconds >= MAX_SECONDS:
            raise AssertionError(f"{seconds * 1000:.1f} ms for {len(data)} bytes")
    if Counted.inputs % 100 == 0:
        tracemalloc.start()
        attempt(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak >= MAX_ALLOCATED:
            raise AssertionError(f"{peak} bytes allocated for {len(data)} bytes")


def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Now and then a real message takes the place of what evolved."""
    if seed % 50 == 0:
        data = cbor.encode(SEEDS[seed // 50 % len(SEEDS)])
    mutated: bytes = atheris.Mutate(data, max_size)
    return mutated


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input, custom_mutator=custom_mutator)
    atheris.Fuzz()
