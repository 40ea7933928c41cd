"""Label-smoothed cross-entropy and its gradient in one pass over the logits, on a CPU.

N positions, V words.  Logits of a large vocabulary fill memory: fairseq's loss makes five tensors of their size, one
after the other.  Here a few rows at a time are computed while they are in the cache, and the gradient alone is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_NUMBERS = 2**18  # of a thread at once: a megabyte


def label_smoothed_nll_loss(logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the sums of fairseq's label-smoothed loss and of its negative log-likelihood, which has no gradient.

    Args:
        logits: (N, V); their softmax is computed at least in float32.
        target: (N,).
        epsilon: the probability that is shared by all words.
        ignore_index: the word of positions that count for nothing.
    """
    return _SmoothedLoss.apply(logits, target, epsilon, ignore_index)


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
        size = logits.size(1)
        of_others = epsilon / (size - 1)
        of_target = 1 - epsilon - of_others
        ignored = target.eq(ignore_index)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        target = target.unsqueeze(1)
        exact = torch.promote_types(logits.dtype, torch.float32)
        nll, smooth = torch.empty(2, len(logits), 1, dtype=exact)
        rows = max(1, torch.get_num_threads() * _NUMBERS // size)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            z = logits[part].to(exact)
            z = z - z.amax(dim=1, keepdim=True)
            p = torch.softmax(z, dim=1)
            log_sum = -p.amax(dim=1, keepdim=True).log()  # the largest z is 0
            torch.sub(log_sum, z.gather(1, target[part]), out=nll[part])
            torch.sub(size * log_sum, z.sum(dim=1, keepdim=True), out=smooth[part])
            if grad is not None:
                # of_target (p - 1 at the target) + of_others (V p - 1)
                p.mul_(of_target + of_others * size)
                p.scatter_add_(1, target[part], p.new_full((len(p), 1), -of_target))
                torch.sub(p, of_others, out=grad[part])
        if grad is not None:
            grad[ignored] = 0
        ctx.save_for_backward(grad)
        sums = [each.squeeze(1).masked_fill_(ignored, 0).sum() for each in (nll, smooth)]
        ctx.mark_non_differentiable(sums[0])
        return of_target * sums[0] + of_others * sums[1], sums[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad if grad_loss == 1 else grad * grad_loss.to(grad.dtype)), None, None, None
