"""Label-smoothed cross-entropy for CPUs, computed with its gradient in one pass over the logits.

fairseq's loss creates five tensors with the size of the logits, which is slow for large vocabularies.  The function in
this module processes chunks of rows that fit into the CPU's cache, and stores only the gradient.

N positions, V words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 2**18  # numbers per thread and chunk, 1 MiB in float32


def label_smoothed_nll_loss(logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return fairseq's label-smoothed loss and the negative log-likelihood, summed over positions.

    Only the loss has a gradient.

    Args:
        logits: logits, (N, V); their softmax is computed in at least float32.
        target: indices of the correct words, (N,).
        epsilon: probability that label smoothing takes from the correct word and divides among the other words.
        ignore_index: value of ``target`` at positions that the loss ignores.
    """
    return _SmoothedLoss.apply(logits, target, epsilon, ignore_index)


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
        size = logits.size(1)
        other_weight = epsilon / (size - 1)
        target_weight = 1 - epsilon - other_weight
        ignored = target.eq(ignore_index)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        target = target.unsqueeze(1)
        exact = torch.promote_types(logits.dtype, torch.float32)
        nll, smooth = torch.empty(2, len(logits), 1, dtype=exact)
        rows = max(1, torch.get_num_threads() * _CHUNK // size)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            z = logits[part].to(exact)
            z = z - z.amax(dim=1, keepdim=True)
            p = torch.softmax(z, dim=1)
            log_sum = -p.amax(dim=1, keepdim=True).log()  # the largest z is 0
            torch.sub(log_sum, z.gather(1, target[part]), out=nll[part])
            torch.sub(size * log_sum, z.sum(dim=1, keepdim=True), out=smooth[part])
            if grad is not None:
                # target_weight (p - 1 at the target) + other_weight (V p - 1)
                p.mul_(target_weight + other_weight * size)
                p.scatter_add_(1, target[part], p.new_full((len(p), 1), -target_weight))
                torch.sub(p, other_weight, out=grad[part])
        if grad is not None:
            grad[ignored] = 0
        ctx.save_for_backward(grad)
        sums = [each.squeeze(1).masked_fill_(ignored, 0).sum() for each in (nll, smooth)]
        ctx.mark_non_differentiable(sums[0])
        return target_weight * sums[0] + other_weight * sums[1], sums[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad if grad_loss == 1 else grad * grad_loss.to(grad.dtype)), None, None, None
