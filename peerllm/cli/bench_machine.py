"""What `peerllm bench e2e` asks of this machine before it plants anything: devices, and whether both halves fit.

`python -m peerllm.cli.bench_machine JSON` answers it in a process of its own, which ends at once: torch makes a context
on every GPU that it is asked about, and what that takes would be missing in the daemons' plans.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, NotEnoughMemory, PeerllmError
from peerllm.protocol.identity import INT8, UNQUANTISED, LayerRange, share_layers
from peerllm.protocol.tensors import DTYPE_BYTES

_GPU_SHAPES = {"shape": "qwen2.5-7b", "draft_shape": "qwen2.5-0.5b"}
_CPU_SHAPES = dict.fromkeys(_GPU_SHAPES, "qwen2.5-tiny")
ASKED = (*_GPU_SHAPES, "devices", "draft_device", "dtype", "weights", "context", "threads")
"""Options of `bench e2e` that are looked at; None where the user named nothing."""


def settled(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options `ASKED`, with the shapes and threads that suit this machine where none were named.

    Raises:
        BadRequest, ModelMismatch, NotEnoughMemory: what both daemons cannot do here, in one line.
    """
    given = json.dumps({name: asked[name] for name in ASKED})
    done = subprocess.run(
        [sys.executable, "-m", __name__, given], capture_output=True, text=True, errors="replace", check=False
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise PeerllmError(f"torch does not start here: {(done.stderr.splitlines() or ['no reason'])[-1]}") from None
    if (refused := answer.get("refused")) is not None:
        raise PeerllmError(refused)
    return answer


def settle(asked: Mapping[str, Any]) -> dict[str, Any]:
    """`settled`, in this process."""
    from peerllm.daemon.agreement import chosen_devices, offered_dtypes
    from peerllm.engine.machine import machine

    found = machine()
    # A machine with GPUs has what it computes in on them; the draft's device has to be there.
    drafting = None if asked["draft_device"] is None else chosen_devices(found, (asked["draft_device"],))[0]["device"]
    chosen = chosen_devices(found, tuple(asked["devices"].split(",")) if asked["devices"] else ())
    dtype = offered_dtypes(found, asked["dtype"], chosen)[0]
    devices = [each["device"] for each in chosen]
    shapes = _CPU_SHAPES if set(devices) == {"cpu"} else _GPU_SHAPES
    answer = {**asked, **{name: asked[name] or shapes[name] for name in shapes}}
    if asked["threads"] is None and "cpu" in devices:
        answer["threads"] = _half_of_the_cores()
    _check_memory(answer, devices, drafting, dtype)
    return answer


def _half_of_the_cores() -> int:
    """Threads that wait for each other are many times slower where another process has their core."""
    affinity = getattr(os, "sched_getaffinity", None)
    return max(1, (len(affinity(0)) if affinity else os.cpu_count() or 1) // 2)


def _check_memory(options: Mapping[str, Any], devices: list[str], drafting: str | None, dtype: str) -> None:
    """Each daemon plans alone, against all that is free: here both plans are added up.

    Raises:
        BadRequest: shapes that are not known, or of two families.
        NotEnoughMemory: with the numbers, and what would help.
    """
    from peerllm.engine.memory import plan_load
    from peerllm.engine.planted import write_config
    from peerllm.engine.shapes import NAMES, named_config

    configs = {}
    for name in _GPU_SHAPES:
        if options[name] not in NAMES:
            option = f"--{name.replace('_', '-')}"
            raise BadRequest(f"{option} {str(options[name])[:32]!r} is not one of {', '.join(NAMES)}")
        configs[name] = named_config(options[name])
    target, draft = configs.values()
    if target.model_type != draft.model_type:
        raise BadRequest(
            f"--shape {options['shape']} is of the family {target.model_type}, --draft-shape {options['draft_shape']} "
            f"of {draft.model_type}: a draft has its target's tokenizer, so name two shapes of one family"
        )
    needed: dict[str, list[int]] = {}
    free: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as made:
        folders = {name: Path(made) / name for name in configs}
        for name, config in configs.items():
            write_config(folders[name], config, dtype)
        for number, layers in enumerate(halves(target.num_hidden_layers)):
            try:
                plan = plan_load(
                    folders["shape"],
                    layers,
                    dtype=dtype,
                    devices=devices,
                    draft_device=drafting,
                    draft=f"model:{folders['draft_shape']}",
                    weights=INT8 if options["weights"] == INT8 else UNQUANTISED,
                    context=options["context"],
                    # A CPU's caches take memory as they are written, and the bench asks for one answer at a time.
                    slots=1 if devices[0] == "cpu" else None,
                )
            except NotEnoughMemory as error:
                raise NotEnoughMemory(
                    f"layers {layers} of {options['shape']} do not fit {error.message}; {_advice(options)}"
                ) from error
            for index, (place, part) in enumerate(plan.devices):
                size = part.total
                # A head is planted on top of its weights, before there are caches: out of the embedding, drawn anew.
                if number == 1 and index == len(plan.devices) - 1:
                    size = max(size, part.weights + _head_bytes(target, dtype))
                elif number == 0 and (part.draft or part.is_for_draft):
                    size = max(size, part.weights + part.draft + _head_bytes(draft, dtype))
                needed.setdefault(str(place), [0, 0])[number] += size
                free[str(place)] = max(free.get(str(place), 0), part.free)
    for device, sizes in needed.items():
        if 0 < free[device] < sum(sizes):
            first, second, together, here = (size // limits.MIB for size in (*sizes, sum(sizes), free[device]))
            raise NotEnoughMemory(
                f"{device}: {together} MiB are needed for both halves of {options['shape']} in {dtype} ({first} MiB of "
                f"the first daemon with the draft, {second} MiB of the second); {here} MiB are free; "
                f"{_advice(options)}"
            )


def _head_bytes(config: Any, dtype: str) -> int:
    return int(config.vocab_size * config.hidden_size) * DTYPE_BYTES[dtype]


def halves(layers: int) -> tuple[LayerRange, LayerRange]:
    """Of the two daemons. Both are on one machine: its free memory says nothing of how they should share."""
    first, second = share_layers(layers, [None, None], [1, 1])
    return first, second


def _advice(options: Mapping[str, Any]) -> str:
    helps = ["a smaller --shape", f"a --context below {options['context']}"]
    return (
        f"{', '.join(helps)} or --weights int8 helps" if options["weights"] != INT8 else f"{' or '.join(helps)} helps"
    )


if __name__ == "__main__":
    try:
        said = settle(json.loads(sys.argv[1]))
    except PeerllmError as problem:
        said = {"refused": problem.message}
    print(json.dumps(said))
