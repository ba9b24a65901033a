"""What has to be set before torch and transformers are imported; imports neither."""

from __future__ import annotations

import os
from pathlib import Path

_SPINS = "6000"
"""How often one of torch's threads looks whether the others are done before it sleeps (libgomp's own: 300,000). All
wait for the one whose core somebody else computes on, and while they spin the system has no idle core to move it to:
with one of two cores busy a step took 765 ms in place of 51, on an idle machine 19 with both (docs/performance.md)."""


def prepare() -> None:
    """For this process. What the environment says already stands."""
    # Importing transformers makes this folder; without a name for it, in the temporary folder, and leaves it there.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "peerllm" / "inductor"))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
