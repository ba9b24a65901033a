"""Find, fetch, convert and slice weights; the tokenizer.

    allowlist    which models may be loaded, and their shape
    layout       which tensors they have, and which of them a layer range needs
    checkpoint   weights out of safetensors files, without mmap
    identity     the hashes by which two peers see that they hold the same model
    description  what is known of a model before it is loaded
    embedded     the embedded model, converted once
    hub          a hub model's description, and the files that a layer range needs
    hub_client   what is asked of the hub, and its errors as ours
    library      describe, find, fetch, cached_models
    tokenizer    prompts to tokens, tokens to text
    cache        whole folders, remembered hashes

Importing this brings neither torch nor transformers.
"""

from peerllm.models.checkpoint import Checkpoint, load_parameters
from peerllm.models.description import ModelDescription
from peerllm.models.library import cached_models, describe, fetch, find
from peerllm.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "Checkpoint",
    "ModelDescription",
    "TextStream",
    "Tokenizer",
    "cached_models",
    "describe",
    "fetch",
    "find",
    "load_parameters",
]
