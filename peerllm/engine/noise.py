"""Gumbel noise as a function of (seed, position, token) alone, so that a sample never depends on how it was computed.

The bits are Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011):

    key     = (low 32 bits of the seed, high 32 bits of the seed)
    counter = (token // 4, position, 0, 0)          word = token % 4

with `position` the absolute index of the token that is drawn and `token` the target model's id. The bits are integers
and equal on every machine; the logarithms are local float32.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_TWO_TO_MINUS_32 = 2.0**-32
_LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 under 1: words near 2**32 round to 1, whose logarithm would exclude a token for ever."""


def philox_4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor | int, torch.Tensor | int]) -> torch.Tensor:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors that broadcast together, each element from 0 to 2**32 - 1.
        key: two of the same, or whole numbers.

    Returns:
        int64, the broadcast shape and one more dimension of 4: the output words, 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2**64, which keeps every bit of the unsigned one.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def seed_key(seed: int) -> tuple[int, int]:
    """The Philox key of a 64-bit seed."""
    return seed & _MASK, seed >> 32 & _MASK


def noise_words(
    seed: int, positions: torch.Tensor, vocabulary: int, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 `[rows, vocabulary]`: the 32 random bits of each token for `positions` `[rows]` (int64).

    `tokens` (int64 `[vocabulary]`) are the target's ids of the columns, where these are not 0, 1, 2, ….
    """
    if tokens is not None:
        return words_of(tokens, positions, seed_key(seed))
    groups = -(-vocabulary // 4)
    block = torch.arange(groups, device=positions.device)
    zero = torch.zeros((), dtype=torch.int64, device=positions.device)
    words = philox_4x32((block[None, :], positions[:, None], zero, zero), seed_key(seed))
    return words.reshape(len(positions), groups * 4)[:, :vocabulary]


def words_of(
    tokens: torch.Tensor, positions: torch.Tensor, key: tuple[torch.Tensor | int, torch.Tensor | int]
) -> torch.Tensor:
    """int64 `[rows, columns]`: the bits of `tokens` `[columns]` at `positions` `[rows]`; int64 both.

    `key` as `philox_4x32` takes it; tensors are `[rows, 1]`, a key for each row.
    """
    zero = torch.zeros((), dtype=torch.int64, device=positions.device)
    words = philox_4x32((tokens[None, :] // 4, positions[:, None], zero, zero), key)
    which = (tokens % 4)[None, :, None].expand(len(positions), -1, 1)
    return words.gather(2, which)[:, :, 0]


def log_exponential(words: torch.Tensor) -> torch.Tensor:
    """log E for 32-bit `words`, E = -log1p(-(k + 1/2) / 2**32) a standard exponential; float32, finite."""
    uniform = ((words.to(torch.float32) + 0.5) * _TWO_TO_MINUS_32).clamp_(max=_LARGEST_UNIFORM)
    return torch.log(-torch.log1p(-uniform))


def perturb(
    scores: torch.Tensor, seed: int, positions: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """`scores` (float32 `[rows, vocabulary]`, -inf where a token is cut off) - log E: their argmax is a sample.

    `positions` `[rows]`, int64, is the absolute index of the token that each row draws. `tokens` as `noise_words`.
    """
    return scores - log_exponential(noise_words(seed, positions, scores.shape[-1], tokens))
