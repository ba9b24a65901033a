"""The choice kernels with their buffers: a block's verdict, and the draft's next step."""

from __future__ import annotations

import torch

from peerllm.engine.choosing import SamplingState
from peerllm.engine.fused import choice

_BLOCK = 512


class FusedChooser:
    """Chooses from `[rows, vocabulary]` logits on the device; `engine.choosing.Chooser`'s interface.

    Args:
        columns: of the logits' buffer.
        vocabulary: columns that count; those beyond are padding.
    """

    def __init__(
        self, *, max_rows: int, columns: int, vocabulary: int, device: torch.device, is_dependent: bool
    ) -> None:
        self._columns = columns
        self._vocabulary = vocabulary
        self._blocks = -(-vocabulary // _BLOCK)
        self._padded = 1 << (self._blocks - 1).bit_length()
        self._options = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}

        def buffer(of: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, self._blocks, dtype=of, device=device)

        self._best, self._largest, self._mass = (buffer(torch.float32) for _ in range(3))
        self._best_token, self._bad = buffer(torch.int32), buffer(torch.int32)
        self._choices = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._flags = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def _blocks_of(self, logits: torch.Tensor, rows: int, slots: torch.Tensor, state: SamplingState) -> None:
        choice.best_of_blocks[(self._blocks, rows)](
            logits, slots, state.positions, state.seeds, state.temperatures,
            self._best, self._best_token, self._largest, self._mass, self._bad,
            self._vocabulary, rows, STRIDE=self._columns, BLOCK=_BLOCK, BLOCKS=self._blocks, **self._options,
        )  # fmt: skip

    def judge(
        self,
        logits: torch.Tensor,
        rows: int,
        slots: torch.Tensor,
        state: SamplingState,
        candidates: torch.Tensor,
        count: torch.Tensor,
        verdict: torch.Tensor,
    ) -> None:
        """Writes (accepted, next token, logits that are not finite) to `verdict` (int32 `[3]`)."""
        self._blocks_of(logits, rows, slots, state)
        choice.choose_rows[(rows,)](
            self._best, self._best_token, self._bad, self._choices, self._flags,
            BLOCKS=self._blocks, PADDED=self._padded, **self._options,
        )  # fmt: skip
        choice.judge_block[(1,)](
            self._choices, self._flags, candidates, count, verdict,
            PADDED=max(16, 1 << (rows - 1).bit_length()), **self._options,
        )  # fmt: skip

    def advance(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        state: SamplingState,
        token: torch.Tensor,
        step: torch.Tensor,
        candidates: torch.Tensor,
        probabilities: torch.Tensor,
    ) -> None:
        """The draft's choice from one row becomes the next step's input; the slot's position moves on."""
        self._blocks_of(logits, 1, slots, state)
        choice.advance_draft[(1,)](
            self._best, self._best_token, self._largest, self._mass, self._bad, logits,
            slots, state.positions, state.temperatures, token, step, candidates, probabilities,
            STRIDE=self._columns, BLOCKS=self._blocks, PADDED=self._padded, **self._options,
        )  # fmt: skip
