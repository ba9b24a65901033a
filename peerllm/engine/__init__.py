"""torch: slices, cache, graphs, draft models, noise, sampling and acceptance, wire codec, the worker."""
