"""torch: slices, cache, graphs, draft models, noise, sampling and acceptance, wire codec, the worker."""

from peerllm.engine import environment

# Here, since whoever imports torch by way of a part of this package imports this first.
environment.prepare()
