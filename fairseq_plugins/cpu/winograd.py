"""Convolutions of width three with a third fewer multiplications (Winograd 1980; F(2, 3) of Lavin & Gray 2016).

Two neighbouring outputs, y_0 = x_0 w_0 + x_1 w_1 + x_2 w_2 and y_1 = x_1 w_0 + x_2 w_1 + x_3 w_2, need six products of
an input and a weight.  Sums of inputs and sums of weights reduce this to four products:

    m_0 = (x_0 - x_2) w_0                      y_0 = m_0 + m_1 + m_2
    m_1 = (x_1 + x_2) (w_0 + w_1 + w_2) / 2    y_1 = m_1 - m_2 + m_3
    m_2 = (x_2 - x_1) (w_0 - w_1 + w_2) / 2
    m_3 = (x_3 - x_1) w_2

If both outputs have similar magnitudes, rounding errors are two to four times as large as with six products.
Otherwise, rounding errors are relative to the larger output, which makes the smaller output less accurate.

T time steps, B sentences, C input width, O output width, J = ⌈T / 2⌉ pairs of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.cpu.packing import BatchWeights
from fairseq_plugins.cpu.products import PackedLinear, can_pack

# Minimum input width.  In narrower layers, the sums take as long as the products that they save.
NARROWEST = 512


def is_faster(like: Tensor, kernel: int, dim: int, packing: BatchWeights | None) -> bool:
    """Return whether `convolve` is faster than a product of windows; in precisions below float32, it is not.

    The answer does not depend on the batch size.  Otherwise batches of different sizes would have to pack different
    matrices.

    Args:
        like: a tensor with the weights' type and device.
        kernel: w.
        dim: C.
        packing: packed weights of the batch; None in training.
    """
    return (
        kernel == 3 and dim >= NARROWEST and packing is not None and packing.precision == "float32" and can_pack(like)
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], packing: BatchWeights) -> Tensor:
    """Return the convolution ``W * x + b``; see `torch.conv_tbc`.

    Args:
        x: (T, B, C).
        weight: (3, C, O).
        bias: (O,).
        padding: numbers of zeros before and after x; their sum is two.
        packing: packed weights of the batch.

    Returns:
        (T, B, O).
    """
    before, after = padding
    length = x.size(0)
    pairs = F.pad(x, (0, 0, 0, 0, before, after + length % 2))
    products = packing.packed(packed_products, weight.flatten(0, 1).t(), bias)
    return _outputs(multiply(sums) for multiply, sums in zip(products, _sums_of_inputs(pairs), strict=True))[:length]


def packed_products(weight: Tensor, bias: Tensor | None, precision: str) -> list[PackedLinear]:
    """Return the four linear maps from sums of inputs, (..., C), to m_0, ..., m_3, (..., O) each.

    Args:
        weight: (O, 3C).
        bias: (O,); m_1 includes it, so both outputs include it.
        precision: see `PackedLinear`.
    """
    sums = sums_of_weights(weight.unflatten(1, (3, -1)).transpose(0, 1))
    return [PackedLinear(*each, precision) for each in zip(sums, (None, bias, None, None), strict=True)]


def _outputs(products: Iterable[Tensor]) -> Tensor:
    """Return the outputs, (2J, B, O), for m_0, ..., m_3, (J, B, O) each, which are overwritten."""
    m0, m1, m2, m3 = products
    y = m0.new_empty(2 * len(m0), *m0.shape[1:])
    torch.add(m0.add_(m1), m2, out=y[0::2])
    torch.add(m1.sub_(m2), m3, out=y[1::2])
    return y


def _sums_of_inputs(x: Tensor) -> Tensor:
    """Return the four sums of inputs for each pair of outputs: (2J + 2, B, C) -> (4, J, B, C)."""
    x0, x1, x2, x3 = x[0:-2:2], x[1:-2:2], x[2::2], x[3::2]
    sums = x.new_empty(4, *x0.shape)
    torch.sub(x0, x2, out=sums[0])
    torch.add(x1, x2, out=sums[1])
    torch.sub(x2, x1, out=sums[2])
    torch.sub(x3, x1, out=sums[3])
    return sums


def sums_of_weights(weight: Tensor) -> Tensor:
    """Return the four sums of weights: (3, C, O) -> (4, C, O)."""
    w0, w1, w2 = weight
    sums = weight.new_empty(4, *w0.shape)
    sums[0], sums[3] = w0, w2
    half = torch.add(w0, w2, out=sums[1]).mul_(0.5)
    torch.sub(half, w1, alpha=0.5, out=sums[2])
    half.add_(w1, alpha=0.5)
    return sums
