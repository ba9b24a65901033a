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
        tokens: int64 `[vocabulary]`, the columns' token ids in ascending order; None: column i is token i.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        columns: int,
        vocabulary: int,
        device: torch.device,
        is_dependent: bool,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self._ids = None if tokens is None else tokens.to(device=device, dtype=torch.int32)
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

    def _blocks_of(
        self, logits: torch.Tensor, rows: int, slots: torch.Tensor, state: SamplingState, *, rows_each: int
    ) -> None:
        choice.best_of_blocks[(self._blocks, rows)](
            logits, slots, state.positions, state.seeds, state.temperatures,
            self._best, self._best_token, self._largest, self._mass, self._bad, self._ids,
            self._vocabulary, rows_each, STRIDE=self._columns, BLOCK=_BLOCK, BLOCKS=self._blocks,
            HAS_IDS=self._ids is not None, **self._options,
        )  # fmt: skip

    def _choose_rows(self, rows: int) -> None:
        choice.choose_rows[(rows,)](
            self._best, self._best_token, self._bad, self._choices, self._flags,
            BLOCKS=self._blocks, PADDED=self._padded, **self._options,
        )  # fmt: skip

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SamplingState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For a batch, a row for each of `slots`: int32 `[rows]` the columns chosen, and how many of the row's logits
        are not finite. Both are buffers that the next call overwrites."""
        rows = len(slots)
        self._blocks_of(logits, rows, slots, state, rows_each=1)
        self._choose_rows(rows)
        return self._choices[:rows], self._flags[:rows]

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
        self._blocks_of(logits, rows, slots, state, rows_each=rows)
        self._choose_rows(rows)
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
        self._blocks_of(logits, 1, slots, state, rows_each=1)
        choice.advance_draft[(1,)](
            self._best, self._best_token, self._largest, self._mass, self._bad, logits,
            slots, state.positions, state.temperatures, token, step, candidates, probabilities, self._ids,
            STRIDE=self._columns, BLOCKS=self._blocks, PADDED=self._padded, HAS_IDS=self._ids is not None,
            **self._options,
        )  # fmt: skip
