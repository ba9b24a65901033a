"""What this machine can compute with. Imports torch and not transformers, whose models take seconds to import."""

from __future__ import annotations

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


def host_memory() -> tuple[int, int]:
    """(available, total) bytes of this machine's memory; zeros where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return kib.get("MemAvailable", 0) * limits.KIB, kib.get("MemTotal", 0) * limits.KIB
