"""A branched block on a processor.

N rows, M branches of a inputs and b inner units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_plugins.backends.cpu.linear import linear
from fairseq_plugins.backends.cpu.packing import cached
from fairseq_plugins.nn.branched_block import BranchedBlock, add_block_diagonal

__all__ = ["FastBranchedBlock", "add_in_place"]


def add_in_place(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`add_block_diagonal`, written over y where nobody needs it any more.

    A batched product would want the blocks outside the rows, x copied into that order and the result back; here each
    block's product reads and writes its columns where they are.  `torch.export` takes no products into given places.
    """
    if y.device.type != "cpu" or torch.compiler.is_compiling():
        return add_block_diagonal(y, x, weight)
    x, weight = x.to(y.dtype), weight.to(y.dtype)
    return _AddInPlace.apply(y, x, weight)


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


class FastBranchedBlock(BranchedBlock):
    """The same, folded once for all batches of a generator, and with fewer copies."""

    linear = staticmethod(linear)
    add_own = staticmethod(add_in_place)
    cached = staticmethod(cached)
