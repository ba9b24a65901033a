"""Where torch's compiler keeps what it compiled. Imports neither torch nor transformers, which have to come after."""

from __future__ import annotations

import os
from pathlib import Path


def name_folder() -> None:
    """Importing transformers makes this folder; without a name for it, in the temporary folder, and leaves it there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "peerllm" / "inductor"))
