"""What this machine can compute with. Imports torch and not transformers, whose models take seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from peerllm.protocol import limits


def machine() -> dict[str, Any]:
    """What the daemon's `machine` operation answers: versions, devices with free bytes, dtypes, best first."""
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        devices.append({"device": f"cuda:{index}", "name": name, "free_bytes": free, "total_bytes": total})
    if devices:
        has_bfloat16 = min(torch.cuda.get_device_capability(index) for index in range(len(devices))) >= (8, 0)
        dtypes = ["bfloat16", "float16", "float32"] if has_bfloat16 else ["float16", "float32"]
    else:
        dtypes = ["float32", "bfloat16"]
    free, total = host_memory()
    devices.append({"device": "cpu", "name": "CPU", "free_bytes": free, "total_bytes": total})
    return {
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "devices": devices,
        "dtypes": dtypes,
    }


def indexed(device: torch.device) -> torch.device:
    """The one name of a device, as tensors have it: `cuda` is the current GPU, and the CPU has no number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes of this process's memory: the machine's, or less where a control group such as a
    container's has a limit. Zeros where the kernel does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    available, total = kib.get("MemAvailable", 0) * limits.KIB, kib.get("MemTotal", 0) * limits.KIB
    for limit, used in _group_limits(root):
        available, total = min(available, max(1, limit - used)), min(total, limit)
    return available, total


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each control group around this process that has a limit, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, which is not there: the mount is the container's own group then.
        group = mount / path.lstrip("/")
        for each in (group, *group.parents):
            yield from _limit_of(each, *names)
            if each == mount:
                break


def _limit_of(group: Path, limit: str, usage: str, inactive: str) -> Iterator[tuple[int, int]]:
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return  # no limit is the word `max`
    # Files that were read and are not in use go when memory is needed.
    yield most, used - int(stat.get(inactive, 0))
