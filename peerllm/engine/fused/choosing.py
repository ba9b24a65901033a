"""The choice kernels with their buffers: a block's verdict, and the draft's next step."""

from __future__ import annotations

import torch

from peerllm.engine.choosing import SamplingState
from peerllm.engine.fused import choice, contenders

_BLOCK = 512
_LISTING_TILE, _LISTING_TILES = 2048, 4
"""Tokens that one program looks through, at once and in turn, for those that may survive top-k and top-p: the programs
are few, for they start in every block's verdict, and have something to do in some."""
_TILE = 4096
"""Tokens that a row's program looks at at once; a multiple of a block."""
_LISTED = 16_384
"""Tokens of a row that its list has room for."""
_BINS = 1024
"""Of a row's scores, by which the threshold is looked for; a power of two."""
_CUT_WARPS = 8
"""Of a row's program, which goes over its list some 20 times."""


class FusedChooser:
    """Chooses from `[rows, vocabulary]` logits on the device; `engine.choosing.Chooser`'s interface.

    Args:
        columns: of the logits' buffer.
        vocabulary: columns that count; those beyond are padding.
        tokens: int64 `[vocabulary]`, the columns' token ids in ascending order; None: column i is token i.
        is_cutting: whether top-k and top-p are applied, or taken to be off. It costs rows without either one launch.
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
        is_cutting: bool = False,
    ) -> None:
        self._ids = None if tokens is None else tokens.to(device=device, dtype=torch.int32)
        self._columns = columns
        self._vocabulary = vocabulary
        self._blocks = -(-vocabulary // _BLOCK)
        self._padded = 1 << (self._blocks - 1).bit_length()
        self._options = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}
        self._is_cutting = is_cutting
        self._capacity = min(_LISTED, vocabulary)

        def buffer(of: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(max_rows, *size, dtype=of, device=device)

        self._best, self._largest, self._mass = (buffer(torch.float32, self._blocks) for _ in range(3))
        self._best_token, self._bad = (buffer(torch.int32, self._blocks) for _ in range(2))
        self._choices, self._flags = (buffer(torch.int32) for _ in range(2))
        self._counts = buffer(torch.int32, 2)
        self._bins = buffer(torch.int64, 2 * _BINS if is_cutting else 0)
        self._marks = buffer(torch.float32, 2)
        self._listed = buffer(torch.float32, self._capacity if is_cutting else 0)
        self._listed_columns = buffer(torch.int32, self._capacity if is_cutting else 0)

    def _blocks_of(
        self, logits: torch.Tensor, rows: int, slots: torch.Tensor, state: SamplingState, *, rows_each: int
    ) -> None:
        choice.best_of_blocks[(self._blocks, rows)](
            logits, slots, state.positions, state.seeds, state.temperatures,
            self._best, self._best_token, self._largest, self._mass, self._bad, self._counts, self._bins,
            self._ids, self._vocabulary, rows_each, STRIDE=self._columns, BLOCK=_BLOCK, BLOCKS=self._blocks,
            BINS=_BINS, ZEROED=1 << (-(-2 * _BINS // self._blocks) - 1).bit_length(),
            HAS_IDS=self._ids is not None, IS_CUTTING=self._is_cutting, **self._options,
        )  # fmt: skip
        if self._is_cutting:
            programs = -(-self._vocabulary // (_LISTING_TILE * _LISTING_TILES))
            contenders.list_contenders[(programs, rows)](
                logits, slots, state.temperatures, state.top_ks, state.top_ps, self._largest, self._mass,
                self._counts, self._bins, self._marks, self._listed, self._listed_columns, self._vocabulary, rows_each,
                STRIDE=self._columns, TILE=_LISTING_TILE, TILES=_LISTING_TILES, BLOCKS=self._blocks,
                PADDED=self._padded, BINS=_BINS, CAPACITY=self._capacity, num_warps=_CUT_WARPS, **self._options,
            )  # fmt: skip

    def _row_options(self) -> dict[str, object]:
        """Of the kernels that have one program a row."""
        return {
            "STRIDE": self._columns,
            "BLOCK": _BLOCK,
            "BLOCKS": self._blocks,
            "PADDED": self._padded,
            "BINS": _BINS,
            "CAPACITY": self._capacity,
            "TILE": _TILE,
            "HAS_IDS": self._ids is not None,
            "IS_CUTTING": self._is_cutting,
            "num_warps": _CUT_WARPS if self._is_cutting else 4,
            **self._options,
        }

    def _choose_rows(
        self, logits: torch.Tensor, rows: int, slots: torch.Tensor, state: SamplingState, *, rows_each: int
    ) -> None:
        self._blocks_of(logits, rows, slots, state, rows_each=rows_each)
        choice.choose_rows[(rows,)](
            self._best, self._best_token, self._largest, self._mass, self._bad,
            self._counts, self._bins, self._marks, self._listed, self._listed_columns, logits,
            slots, state.positions, state.seeds, state.temperatures, state.top_ks, state.top_ps, self._ids,
            self._choices, self._flags, self._vocabulary, rows_each, **self._row_options(),
        )  # fmt: skip

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SamplingState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For a batch, a row for each of `slots`: int32 `[rows]` the columns chosen, and how many of the row's logits
        are not finite. Both are buffers that the next call overwrites."""
        rows = len(slots)
        self._choose_rows(logits, rows, slots, state, rows_each=1)
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
        self._choose_rows(logits, rows, slots, state, rows_each=rows)
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
            self._best, self._best_token, self._largest, self._mass, self._bad,
            self._counts, self._bins, self._marks, self._listed, self._listed_columns, logits,
            slots, state.positions, state.seeds, state.temperatures, state.top_ks, state.top_ps,
            token, step, candidates, probabilities, self._ids, self._vocabulary, **self._row_options(),
        )  # fmt: skip
