"""Convolutions of width three with two thirds of the multiplications (Winograd 1980; F(2, 3) of Lavin & Gray 2016).

Two neighbouring outputs, y_0 = x_0 w_0 + x_1 w_1 + x_2 w_2 and y_1 = x_1 w_0 + x_2 w_1 + x_3 w_2, are six products of
an input and a weight.  Of sums of inputs and sums of weights they are four:

    m_0 = (x_0 - x_2) w_0                      y_0 = m_0 + m_1 + m_2
    m_1 = (x_1 + x_2) (w_0 + w_1 + w_2) / 2    y_1 = m_1 - m_2 + m_3
    m_2 = (x_2 - x_1) (w_0 - w_1 + w_2) / 2
    m_3 = (x_3 - x_1) w_2

So are the gradients.  Rounding errors are two to four times those of the six for numbers of like size, and as large as
those of the neighbour.

T time steps, B sentences, C input width, O output width, J = ⌈T / 2⌉ pairs of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_plugins.backends.cpu.linear import prefers_onednn
from fairseq_plugins.backends.cpu.packing import BatchPacking, current_packing
from fairseq_plugins.backends.cpu.products import Packed, can_pack

__all__ = ["NARROWEST_PACKED", "convolve", "packed_products", "packing_for", "pays", "sums_of_weights", "sums_pay"]

# In narrower layers, or in training with fewer inputs, making the sums takes as long as the products that they save.
_NARROWEST, _FEWEST, NARROWEST_PACKED = 256, 512, 512


def pays(x: Tensor, kernel: int) -> bool:
    """Whether to `convolve` x, (T, B, C), with a third less work."""
    return packing_for(x, kernel, x.size(2)) is not None or (
        kernel == 3
        and can_pack(x)  # first, for it asks no size of a program that is exported
        and x.size(2) >= _NARROWEST
        and x.size(0) * x.size(1) >= _FEWEST
        and torch.is_grad_enabled()
        and not prefers_onednn(x)
    )


def packing_for(like: Tensor, kernel: int, dim: int) -> BatchPacking | None:
    """The packing of now, if translating with its `packed_products` pays; to pack them for one batch alone hardly does.

    The answer does not depend on the size of the batch, or the next one might have to pack anew.

    Args:
        like: a tensor of the weights' type and device.
        kernel: w.
        dim: C.
    """
    packing = current_packing(like)
    if packing is None or kernel != 3 or dim < NARROWEST_PACKED:
        return None
    return packing if sums_pay(packing.precision) else None


def sums_pay(precision: str) -> bool:
    """Not where products are several times as fast as in float32: in int8, and in bfloat16 by AMX."""
    return precision == "float32" or (precision == "bfloat16" and not torch.cpu._is_amx_tile_supported())


def convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
    """``W * x + b``, as `torch.conv_tbc`.

    Args:
        x: (T, B, C).
        weight: (3, C, O).
        bias: (O,).
        padding: zeros before and after x, two together.

    Returns:
        (T, B, O).
    """
    before, after = padding
    length = x.size(0)
    pairs = F.pad(x, (0, 0, 0, 0, before, after + length % 2))
    packing = current_packing(weight)
    if packing is None:
        y: Tensor = _Winograd.apply(pairs, weight, bias)
    else:
        products = packing.packed(packed_products, weight.flatten(0, 1).t(), bias)
        y = _outputs(multiply(sums) for multiply, sums in zip(products, _sums_of_inputs(pairs), strict=True))
    return y[:length]


def packed_products(weight: Tensor, bias: Tensor | None, precision: str) -> list[Packed]:
    """The maps from sums of inputs, (..., C), to the products m_0 to m_3, (..., O).

    Args:
        weight: (O, 3C).
        bias: (O,), which becomes a part of m_1 and so of both outputs.
        precision: as of `Packed`.
    """
    sums = sums_of_weights(weight.unflatten(1, (3, -1)).transpose(0, 1))
    return [Packed(*each, precision) for each in zip(sums, (None, bias, None, None), strict=True)]


class _Winograd(torch.autograd.Function):
    """x (2J + 2, B, C), weight and bias to (2J, B, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)  # sums are soon made again, and would take more memory
        products = torch.bmm(_sums_of_inputs(x).flatten(1, 2), sums_of_weights(weight))
        products[1] += bias
        return _outputs(products.view(4, -1, x.size(1), weight.size(2)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        for_products = _gradient_of_outputs(grad).flatten(1, 2)
        for_weights = torch.bmm(_sums_of_inputs(x).flatten(1, 2).transpose(1, 2), for_products)
        for_sums = torch.bmm(for_products, sums_of_weights(weight).transpose(1, 2))
        return (
            _gradient_of_inputs(for_sums.view(4, -1, *x.shape[1:])),
            _gradient_of_weight(for_weights),
            grad.sum(dim=(0, 1)),
        )


def _outputs(products: Iterable[Tensor]) -> Tensor:
    """Four of (J, B, O), which are overwritten, to (2J, B, O)."""
    m0, m1, m2, m3 = products
    y = m0.new_empty(2 * len(m0), *m0.shape[1:])
    torch.add(m0.add_(m1), m2, out=y[0::2])
    torch.add(m1.sub_(m2), m3, out=y[1::2])
    return y


def _sums_of_inputs(x: Tensor) -> Tensor:
    """x (2J + 2, B, C) to what is multiplied for each pair of outputs, (4, J, B, C)."""
    x0, x1, x2, x3 = x[0:-2:2], x[1:-2:2], x[2::2], x[3::2]
    sums = x.new_empty(4, *x0.shape)
    torch.sub(x0, x2, out=sums[0])
    torch.add(x1, x2, out=sums[1])
    torch.sub(x2, x1, out=sums[2])
    torch.sub(x3, x1, out=sums[3])
    return sums


def sums_of_weights(weight: Tensor) -> Tensor:
    """(3, C, O) to (4, C, O)."""
    w0, w1, w2 = weight
    sums = weight.new_empty(4, *w0.shape)
    sums[0], sums[3] = w0, w2
    half = torch.add(w0, w2, out=sums[1]).mul_(0.5)
    torch.sub(half, w1, alpha=0.5, out=sums[2])
    half.add_(w1, alpha=0.5)
    return sums


def _gradient_of_weight(grad: Tensor) -> Tensor:
    """The gradient of `sums_of_weights`, (4, C, O) to (3, C, O)."""
    s0, s1, s2, s3 = grad
    weight = grad.new_empty(3, *s0.shape)
    half = (s1 + s2).mul_(0.5)
    torch.add(s0, half, out=weight[0])
    torch.sub(s1, s2, out=weight[1]).mul_(0.5)
    torch.add(s3, half, out=weight[2])
    return weight


def _gradient_of_inputs(grad: Tensor) -> Tensor:
    """The gradient of `_sums_of_inputs`, (4, J, B, C) to (2J + 2, B, C)."""
    s0, s1, s2, s3 = grad
    x = grad.new_empty(2 * len(s0) + 2, *s0.shape[1:])
    even, odd = x[0::2], x[1::2]
    even[0] = 0
    torch.sub(s1, s0, out=even[1:])
    even[1:] += s2
    even[:-1] += s0
    torch.sub(s1, s2, out=odd[:-1])
    odd[:-1] -= s3
    odd[-1] = 0
    odd[1:] += s3
    return x


def _gradient_of_outputs(grad: Tensor) -> Tensor:
    """The gradient of y_0 and y_1, (2J, B, O), to that of the products, (4, J, B, O)."""
    y0, y1 = grad[0::2], grad[1::2]
    products = grad.new_empty(4, *y0.shape)
    products[0] = y0
    torch.add(y0, y1, out=products[1])
    torch.sub(y0, y1, out=products[2])
    products[3] = y1
    return products
