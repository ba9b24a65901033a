"""The small model: the target's own block shape, begun from some of its layers, with a head of its most used tokens."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.options import Recipe
from peerllm.engine.distill.whole import normed_rows, padded
from peerllm.engine.drafting.distilled import CutSlice, give_embedding, give_head
from peerllm.engine.slice import ModelSlice

_EXPECTED_ROWS, _CPU_EXPECTED_ROWS, _EXPECTED_SAMPLES = 1 << 16, 1 << 12, 32


def count_tokens(samples: Iterable[Sample], vocabulary: int) -> numpy.ndarray:
    """int64 `[vocabulary]`: how often each token stands in the answers."""
    counts = numpy.zeros(vocabulary, dtype=numpy.int64)
    for sample in samples:
        counts += numpy.bincount(sample.tokens[sample.start :], minlength=vocabulary)
    return counts


@torch.no_grad()
def expected_tokens(target: ModelSlice, samples: Sequence[Sample]) -> numpy.ndarray:
    """float64 `[vocabulary]`: how often the target would have said each token at the places of these answers.

    Its probabilities say far more than the tokens that were drawn from them, so some thousand places are enough: the
    first _EXPECTED_ROWS on a GPU, fewer on the CPU.
    """
    if target.head is None:
        raise RuntimeError("a target is distilled whole")
    most = _EXPECTED_ROWS if target.device.type != "cpu" else _CPU_EXPECTED_ROWS
    found = torch.zeros(target.shape.vocabulary, dtype=torch.float64, device=target.device)
    rows = 0
    for start in range(0, len(samples), _EXPECTED_SAMPLES):
        if rows >= most:
            break
        hidden = normed_rows(target, *padded(samples[start : start + _EXPECTED_SAMPLES], target.device))
        found += torch.softmax((hidden @ target.head.weight.t()).to(torch.float32), dim=1).sum(dim=0)
        rows += len(hidden)
    return found.cpu().numpy()


def most_used(counts: numpy.ndarray, top: int, always: Collection[int]) -> list[int]:
    """The `top` tokens of the head, ascending.

    Args:
        counts: `[vocabulary]`, how often each is used.
        always: tokens that are in it in any case.

    Of tokens used equally often the lower ids come first: a BPE vocabulary has its frequent tokens there.
    """
    order = sorted(range(len(counts)), key=lambda token: (token not in always, -float(counts[token]), token))
    return sorted(order[:top])


def student_config(config: Any, layers: int) -> Any:
    """The target's configuration with so many layers."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = layers
    if getattr(small, "layer_types", None):
        small.layer_types = list(small.layer_types)[:layers]
    return small


def make_student(target: ModelSlice, recipe: Recipe, tokens: list[int]) -> CutSlice:
    """A student in float32 on the target's device, ready to be trained: layers and norm have gradients.

    Its embedding and head are the target's own and stay as they are.
    """
    device = target.device
    part = CutSlice(student_config(target.config, recipe.layers), torch.tensor(tokens, device=device))
    sources = [target.layers[index] for index in recipe.init_from]
    for own, source in zip(part.layers, sources, strict=True):
        _copy_weights(own, source)
    if part.norm is None or target.norm is None or target.embed is None or target.head is None:
        raise RuntimeError("a target is distilled whole")
    _copy_weights(part.norm, target.norm)
    give_embedding(part, target.embed.weight.detach().to(torch.float32))
    # The head multiplies in the target's dtype, as in the loss.
    give_head(part, target.head.weight.detach().index_select(0, torch.tensor(tokens, device=device)))
    return part


def _copy_weights(own: nn.Module, source: nn.Module) -> None:
    values = dict(source.named_parameters())
    for name, _ in list(own.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        fresh = nn.Parameter(values[name].detach().to(torch.float32).clone(), requires_grad=True)
        setattr(own.get_submodule(owner), attribute, fresh)


def trained_parameters(part: CutSlice) -> dict[str, nn.Parameter]:
    """By the names that a checkpoint has for them."""
    names = part.own_map()
    return {names[name]: parameter for name, parameter in part.named_parameters() if name in names}
