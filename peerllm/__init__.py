"""Two people whose GPUs are each too small run one language model together over the internet."""

__version__ = "0.1.0"
