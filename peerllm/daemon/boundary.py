"""What crosses between the two slices of the model."""

from __future__ import annotations

from dataclasses import dataclass

from peerllm.protocol import limits
from peerllm.protocol.tensors import wire_bytes


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses the link: the agreed codec and dtype, the hidden size, and the context both sides hold."""

    codec: str
    dtype: str
    width: int
    context: int

    @property
    def prefill_rows(self) -> int:
        """Rows in one prefill chunk."""
        row = wire_bytes(self.codec, self.dtype, 1, self.width)
        return max(1, min(limits.PREFILL_CHUNK_ROWS, limits.PREFILL_CHUNK_BYTES // row))

    @property
    def max_candidates(self) -> int:
        row = wire_bytes(self.codec, self.dtype, 1, self.width)
        return max(0, min(limits.MAX_CANDIDATES, limits.MAX_HIDDEN_BYTES // row - 1))
