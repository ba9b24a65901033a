"""Telling that memory ran out, and what is to be done then."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for a GPU's allocator alone; libraries and the CPU's say it in words. While a graph is captured
    it is what came before the error."""
    words = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if any(each in words for each in ("out of memory", "alloc_failed", "can't allocate memory")):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def give_back() -> None:
    """To the GPU, what nothing holds any more: a plan, of another process too, asks the driver what is free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
