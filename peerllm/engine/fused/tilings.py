"""How each product is cut up: measured on an H200 where a line says so by being here, guessed by size elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

NARROW = 16
"""Rows of a tile of the matrix units: up to so many cost the same."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut up: columns and depth of a tile, warps, loads in flight, parts of the depth."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    parts: int = 1

    def fitted(self, bytes_each: int, shared: int) -> Tiling:
        """With fewer loads in flight, and then shallower, until it fits.

        Args:
            bytes_each: of all that a tile loads for one step of its depth.
            shared: bytes of shared memory that a program may have.
        """
        fitting = self
        while fitting.stages * fitting.block_k * bytes_each > shared:
            if fitting.stages > 2:
                fitting = replace(fitting, stages=fitting.stages - 1)
            elif fitting.block_k > 32:
                fitting = replace(fitting, block_k=fitting.block_k // 2)
            else:
                break
        return fitting


TILINGS: dict[tuple[int, int, bool], Tiling] = {
    (1152, 896, False): Tiling(16, 1024, 4, 2),
    (896, 896, False): Tiling(16, 256, 4, 4),
    (4864, 896, True): Tiling(32, 128, 2, 4),
    (896, 4864, False): Tiling(16, 256, 4, 3, parts=8),
    (151936, 896, False): Tiling(64, 128, 2, 3),
    (4608, 3584, False): Tiling(64, 128, 2, 5, parts=2),
    (3584, 3584, False): Tiling(32, 128, 4, 8),
    (18944, 3584, True): Tiling(32, 128, 2, 2),
    (3584, 18944, False): Tiling(32, 512, 4, 4),
    (152064, 3584, False): Tiling(32, 128, 2, 6),
}
"""(columns, depth, whether gated) to what was measured best on an H200; others get `default_tiling`."""


_HEAD_COLUMNS = 1 << 15
"""Products of more columns are heads, whose vocabularies differ by padding, or are cut."""


def default_tiling(columns: int, depth: int, *, is_gated: bool) -> Tiling:
    """Small matrices need many programs to have enough loads in flight, large ones need large tiles. A head takes what
    was measured for one of its depth and, within 5%, its columns."""
    if is_gated:
        return Tiling(32, 128, 2, 4)
    near = [each for each in TILINGS if each[1:] == (depth, False) and abs(each[0] - columns) <= columns // 20]
    if columns > _HEAD_COLUMNS and near:
        return TILINGS[min(near, key=lambda each: abs(each[0] - columns))]
    if columns * depth > 1 << 25:
        return Tiling(32, 128, 2, 6)
    parts = 4 if depth >= 4 * columns else 1
    return Tiling(16, 256 if depth % 256 == 0 else 128, 4, 4, parts=parts)


def attention_splits(capacity: int, head_dim: int) -> tuple[int, int]:
    """Positions of a split of a cache, and how many splits: enough programs for every multiprocessor at a thousand
    positions; longer caches take longer splits."""
    split = min(128, max(4096 // head_dim, 1 << (-(-capacity // 64) - 1).bit_length()))
    return split, -(-capacity // split)


INT8_PARTS = 8
"""Into which an int8 product's depth may be cut at most."""
TILINGS_INT8: dict[tuple[int, int, bool, int], Tiling] = {
    (18944, 3584, True, 16): Tiling(32, 256, 4, 4),
    (3584, 18944, False, 16): Tiling(64, 256, 2, 4, parts=3),
    (4608, 3584, False, 16): Tiling(128, 256, 4, 3, parts=4),
    (3584, 3584, False, 16): Tiling(64, 256, 2, 4, parts=3),
    (18944, 3584, True, 128): Tiling(64, 128, 8, 4),
    (3584, 18944, False, 128): Tiling(128, 128, 8, 4, parts=8),
    (4608, 3584, False, 128): Tiling(64, 128, 8, 3, parts=4),
    (3584, 3584, False, 128): Tiling(64, 128, 8, 3, parts=3),
}
"""(columns, depth, whether gated, rows of a tile) to what was measured best on an H200."""
_PROGRAMS = 256
"""So many keep the multiprocessors of a large GPU busy, two on each."""


def int8_tiling(columns: int, depth: int, rows: int, *, is_gated: bool) -> Tiling:
    """Of `int8_matmul`, for a tile of `rows` rows.

    Each program reads all rows of the activations, so a tile has many columns, and the depth is cut up where that
    leaves too few programs.
    """
    known = TILINGS_INT8.get((columns, depth, is_gated, rows))
    if known is not None:
        return known
    block_k = 128 if depth % 128 == 0 else 64
    if rows > 64:
        block_n, warps, stages, programs = 64 if is_gated else 128, 8, 3, _PROGRAMS // 2
    else:
        block_n, warps, stages, programs = 64, 4, 4, _PROGRAMS
    return Tiling(
        block_n, block_k, warps, stages, parts=1 if is_gated else parts_for(columns, depth, block_n, programs)
    )


def parts_for(columns: int, depth: int, block_n: int, programs: int) -> int:
    """Parts of the depth, for about so many programs in all; none is shallower than 512."""
    wanted = -(-programs // -(-columns // block_n))
    return max(1, min(wanted, INT8_PARTS, depth // 512))
