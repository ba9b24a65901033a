"""The target's full distribution against the student's, and its gradient, in pieces.

For each row the loss is the cross-entropy of the student's distribution q over the head's tokens under the target's
probabilities p of these tokens: -Σ p log q. p is not made to add up to one again: where the target mostly says tokens
that the head lacks, the row hardly counts, since no draft could be right there. Whole logits of a step would take
gigabytes, so a piece's gradient is taken at once (as fused linear cross-entropy does) and only that of the hidden
states is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PIECE_ELEMENTS = 1 << 28
"""Logits of the target at once: a gibibyte in float32."""
_CPU_PIECE_ELEMENTS = 1 << 24


@dataclass(slots=True)
class LossFigures:
    """Sums over rows, on the device; floats after `figures`."""

    loss: torch.Tensor
    divergence: torch.Tensor
    """Σ p log (p / q) over the head's tokens: what of the loss the student can do something about."""
    agreeing: torch.Tensor
    """Rows where both have the same best token."""
    rows: int


@torch.no_grad()
def distribution_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_head: torch.Tensor,
    teacher_head: torch.Tensor,
    tokens: torch.Tensor,
) -> tuple[LossFigures, torch.Tensor]:
    """The loss summed over rows, and its gradient `[rows, width]` by the student's hidden states, float32.

    Args:
        student: normed hidden states `[rows, width]`.
        teacher: the target's, normed, `[rows, width]`.
        student_head: `[tokens, width]`.
        teacher_head: `[vocabulary, width]`.
        tokens: int64, the rows of `teacher_head` that `student_head` has.
    """
    rows = len(student)
    device = student.device
    gradient = torch.empty(student.shape, dtype=torch.float32, device=device)
    loss, divergence, agreeing = (torch.zeros((), device=device) for _ in range(3))
    total = LossFigures(loss, divergence, agreeing, rows)
    elements = _PIECE_ELEMENTS if device.type != "cpu" else _CPU_PIECE_ELEMENTS
    piece = max(1, elements // len(teacher_head))
    for start in range(0, rows, piece):
        here = slice(start, start + piece)
        wide = (teacher[here] @ teacher_head.t()).to(torch.float32)
        log_p = wide.index_select(1, tokens) - torch.logsumexp(wide, dim=1, keepdim=True)
        best = wide.argmax(dim=1)
        del wide
        p = log_p.exp()
        log_q = torch.log_softmax((student[here].to(student_head.dtype) @ student_head.t()).to(torch.float32), dim=1)
        total.loss -= (p * log_q).sum()
        total.divergence += (p * (log_p - log_q)).sum()
        total.agreeing += (tokens[log_q.argmax(dim=1)] == best).sum()
        slope = log_q.exp_().mul_(p.sum(dim=1, keepdim=True)).sub_(p)
        gradient[here] = (slope.to(student_head.dtype) @ student_head).to(torch.float32)
    return total, gradient
