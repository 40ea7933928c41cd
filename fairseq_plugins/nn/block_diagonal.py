"""A linear map whose matrix is block-diagonal, between tensors that keep their blocks side by side.

N rows, M blocks of a inputs and b outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["block_diagonal_linear"]


def block_diagonal_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``y_i = x_i W_i`` for each block i.

    On the CPU a batched product would want the blocks outside the rows, x copied into that order and y back; here each
    block's product reads and writes its columns where they are.  A GPU's batched product reads them where they are too,
    and one kernel is better than many.

    Args:
        x: (N, M·a).
        weight: (M, a, b).

    Returns:
        (N, M·b).
    """
    weight = weight.to(x.dtype)  # under autocast the two may come in different precisions
    if x.is_cuda:
        return torch.bmm(x.unflatten(1, (len(weight), -1)).transpose(0, 1), weight).transpose(0, 1).flatten(1)
    y: Tensor = _BlockDiagonalLinear.apply(x, weight)
    return y


class _BlockDiagonalLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        blocks, _, size = weight.shape
        y = x.new_empty(x.size(0), blocks * size)
        for x_i, w_i, y_i in zip(_split(x, blocks), weight, _split(y, blocks), strict=True):
            torch.mm(x_i, w_i, out=y_i)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        blocks = len(weight)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for x_i, w_i, g_i, grad_x_i, grad_w_i in zip(
            _split(x, blocks), weight, _split(grad, blocks), _split(grad_x, blocks), grad_weight, strict=True
        ):
            torch.mm(g_i, w_i.t(), out=grad_x_i)
            torch.mm(x_i.t(), g_i, out=grad_w_i)
        return grad_x, grad_weight


def _split(x: Tensor, blocks: int) -> tuple[Tensor, ...]:
    return x.chunk(blocks, dim=1)
