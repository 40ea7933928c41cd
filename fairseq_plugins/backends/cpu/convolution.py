"""Gated convolutions on a processor: all positions at once, and one more input of each row at a time.

T time steps, B sentences, R rows, C input width, O output width, w kernel width.

With a kernel of three, two steps need four products of C x O in the place of six.  Of those in which `winograd` makes
two outputs, only m_3 has the last input: the first step takes m_0, m_1 and m_2, and leaves m_1 - m_2 to the second,
which adds m_3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.backends.cpu import winograd
from fairseq_plugins.backends.cpu.linear import linear, prefers_onednn
from fairseq_plugins.models.convs2s.stepwise import StepConvolution
from fairseq_plugins.nn.gated_convolution import GatedConvolution

__all__ = ["FastGatedConvolution", "lay_out_", "step_in_pairs"]


class FastGatedConvolution(GatedConvolution):
    """The same by whichever way is fastest: in pairs of outputs, as one product of windows, or as torch does it."""

    linear = staticmethod(linear)

    def convolve(self, x: Tensor) -> Tensor:
        """``W * x + b``: (T, B, C) -> (T, B, 2D)."""
        if winograd.pays(x, self.kernel):
            return winograd.convolve(x, self.weight, self.bias, self.padding)
        if not prefers_onednn(x):
            return super().convolve(x)
        length = x.size(0)
        x = F.pad(x, (0, 0, 0, 0, *self.padding))
        windows = torch.cat([x[start : start + length] for start in range(self.kernel)], dim=-1)
        return linear(windows, self.matrix, self.bias)


def lay_out_(convolution: GatedConvolution) -> None:
    """Let the plain weight lie in memory so that its `matrix` is contiguous; shape and values stay.

    As the strides of the parameter itself, this layout cannot go stale, and loading a checkpoint keeps it.
    """
    convolution.weight.data = convolution.weight.data.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def step_in_pairs(convolution: GatedConvolution, rows: int) -> StepConvolution | None:
    """The convolution in pairs of steps, with the weights as they are now; None where that does not pay.

    Args:
        convolution: causal, with plain weights.
        rows: R at the start; later steps may have fewer.
    """
    matrix, dim = convolution.matrix, convolution.weight.size(1)
    packing = winograd.packing_for(matrix, convolution.kernel, dim)
    if packing is None:
        return None
    return _InPairs(packing.packed(winograd.packed_products, matrix, convolution.bias), matrix.new_zeros(rows, dim))


class _InPairs(StepConvolution):
    """Two steps in four products; the last two inputs take the place of product and window.

    Args:
        products: those of `winograd.packed_products`.
        zeros: (R, C).
    """

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], zeros: Tensor) -> None:
        self.products = products
        self.inputs = zeros, zeros  # the last two inputs
        self.rest: Tensor | None = None  # m_1 - m_2, between the two

    def convolve(self, x: Tensor, order: Tensor | None) -> Tensor:
        """As `StepConvolution.convolve`."""
        multiply0, multiply1, multiply2, multiply3 = self.products
        (first, second), rest = self.inputs, self.rest
        if order is not None:
            first, second = first.index_select(0, order), second.index_select(0, order)
        self.inputs = second, x
        if rest is None:
            m1, m2 = multiply1(second + x), multiply2(x - second)
            self.rest = m1 - m2
            return multiply0(first - x).add_(m1).add_(m2)
        if order is not None:
            rest = rest.index_select(0, order)
        self.rest = None
        return multiply3(x - first).add_(rest)
