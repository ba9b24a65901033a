"""Which way a slice runs on its device."""

from __future__ import annotations

from peerllm.engine import fused
from peerllm.engine.cache import KvCache
from peerllm.engine.chain import AnyCache, AnySlice, CacheChain, ChainRunner, SliceChain
from peerllm.engine.module_slice import ModuleSlice
from peerllm.engine.runner import BUCKETS, PREFILL_BUCKETS, EagerRunner, GraphRunner, Runner, StaticSlice
from peerllm.engine.slice import ModelSlice
from peerllm.protocol.errors import BadRequest

PATHS = ("auto", "eager", "graph", "fused")
"""eager: the modules. graph: CUDA graphs of the modules. fused: graphs of Triton kernels. auto: the last that works."""


def make_static(
    part: ModelSlice, cache: KvCache, path: str, *, max_rows: int, is_draft: bool = False
) -> StaticSlice | None:
    """What to capture; None is for eager.

    Args:
        is_draft: of a draft a row need not be what it is in a block, to the last bit.

    Raises:
        BadRequest: `path` is not one of `PATHS`.
    """
    if path not in PATHS:
        raise BadRequest(f"path {path[:32]!r} is not one of {', '.join(PATHS)}", param="path")
    if path == "auto":
        path = "eager"
        if part.device.type == "cuda":
            path = "fused" if fused.is_available(part.device) and fused.supports(part) else "graph"
    if path == "eager":
        return None
    if path == "graph":
        return ModuleSlice(part, cache, max_rows=max_rows)
    from peerllm.engine.fused.layers import FusedSlice

    return FusedSlice(
        part,
        cache,
        max_rows=max_rows,
        is_dependent=fused.has_dependent_launch(part.device),
        programs=fused.multiprocessors(part.device) if is_draft else 0,
    )


def make_runner(part: AnySlice, cache: AnyCache, path: str = "auto") -> Runner:
    """The runner of a slice of the target model."""
    if isinstance(part, SliceChain) or isinstance(cache, CacheChain):
        if not (isinstance(part, SliceChain) and isinstance(cache, CacheChain)):
            raise TypeError("a chain of slices has a chain of caches")
        runners = [make_runner(each, of, path) for each, of in zip(part.parts, cache.caches, strict=True)]
        return ChainRunner(runners, [each.device for each in part.parts])
    static = make_static(part, cache, path, max_rows=max(*BUCKETS, *PREFILL_BUCKETS))
    return EagerRunner(part, cache) if static is None else GraphRunner(static)
