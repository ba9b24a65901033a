"""Programmatic dependent launch (sm_90): a kernel's blocks come up while the one before it finishes.

Every kernel of a chain waits before it touches what another wrote, also where it then has nothing to do; so the order
of effects is that of the launches. It lets its successor start only after that wait: otherwise kernels far down the
chain would come up, wait, and hold the registers that the running ones need (measured: 1.4 times slower than without).
"""

# Kernels are written in Triton's language, which only looks like Python.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(is_dependent: tl.constexpr):
    if is_dependent:
        gdc_wait()


@triton.jit
def dependents_may_start(is_dependent: tl.constexpr):
    if is_dependent:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointer, COUNT: tl.constexpr, available):
    """Asks for `COUNT` contiguous elements, of which `available` exist, to be brought into the L2 cache."""
    LINE: tl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = COUNT // LINE
    STEP: tl.constexpr = 256
    for start in range(0, LINES, STEP):
        line = start + tl.arange(0, STEP)
        # Lines past the end ask for the first again: a prefetch takes no mask.
        line = tl.where((line < LINES) & (line * LINE < available), line, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(pointer + line * LINE).to(tl.int64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
