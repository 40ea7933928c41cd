"""A block-diagonal product added in place, for the branches of the Weighted Transformer.

N rows; M blocks, each with a inputs and b outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_block_diagonal(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``y_i + x_i W_i`` for each block i, and overwrite y.

    Columns of x and y are divided into M blocks.  A batched product would copy x and y to make the blocks their first
    dimension.  On a CPU, each block's product therefore reads and writes its columns in place.  GPUs use the batched
    product, and so does `torch.export`, which rejects in-place products.

    Args:
        y: (N, M·b); do not use it afterwards.
        x: (N, M·a).
        weight: (M, a, b).

    Returns:
        (N, M·b).
    """
    x, weight = x.to(y.dtype), weight.to(y.dtype)  # under autocast, the precisions may differ
    if y.device.type != "cpu" or torch.compiler.is_compiling():
        return batched(y, x, weight)
    return _AddInPlace.apply(y, x, weight)


def batched(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the result of `add_block_diagonal` with plain PyTorch, without overwriting y."""
    rows, by_block = (part.unflatten(1, (len(weight), -1)).transpose(0, 1) for part in (y, x))
    return torch.baddbmm(rows, by_block, weight).transpose(0, 1).flatten(1)


class _AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mark_dirty(y)
        for x_i, w_i, y_i in zip(_split(x, weight), weight, _split(y, weight), strict=True):
            y_i.addmm_(x_i, w_i)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for x_i, w_i, g_i, grad_x_i, grad_w_i in zip(
            _split(x, weight), weight, _split(grad, weight), _split(grad_x, weight), grad_weight, strict=True
        ):
            torch.mm(g_i, w_i.t(), out=grad_x_i)
            torch.mm(x_i.t(), g_i, out=grad_w_i)
        return grad, grad_x, grad_weight


def _split(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(len(weight), dim=1)
