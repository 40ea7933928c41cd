"""A causal convolution at decoding time: one more input of each row, one more output.

R rows, C input width, O output width, w kernel width.

With a kernel of three, two steps need four products of C x O in the place of six.  Of those in which `winograd` makes
two outputs, only m_3 has the last input: the first step takes m_0, m_1 and m_2, and leaves m_1 - m_2 to the second,
which adds m_3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from fairseq_plugins.nn import winograd
from fairseq_plugins.nn.decoder_state import Window
from fairseq_plugins.nn.gated_convolution import GatedConvolution
from fairseq_plugins.nn.step_linear import step_linear

__all__ = ["StepConvolution", "step_convolution"]


class StepConvolution(Protocol):
    """What a convolution keeps of its inputs, and its step.

    It has a method and is not called by itself: torch 2.6 would compile a step anew for each such object.
    """

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """One output of each row, (R, O).

        Args:
            x: the next inputs, (R, C), which nobody overwrites for two steps.
            order: the earlier row that each row continues, (R,); None when nothing moved.
        """


def step_convolution(convolution: GatedConvolution, rows: int, fixed: bool) -> StepConvolution:
    """``W * x + b`` without its gate, for many steps without gradients, with the weights as they are now.

    Args:
        convolution: causal, with plain weights.
        rows: R at the start; later steps may have fewer.
        fixed: as of `Window`.
    """
    kernel, dim, _ = convolution.weight.shape
    matrix, bias = convolution.matrix, convolution.bias
    packing = None if fixed else winograd.packing_for(matrix, kernel, dim)  # a step that is compiled is one program
    if packing is not None:
        return _InPairs(packing.packed(winograd.packed_products, matrix, bias), matrix.new_zeros(rows, dim))
    return _OneByOne(step_linear(matrix, bias, rows), Window(rows, kernel, dim, like=matrix, fixed=fixed))


class _OneByOne:
    """A product of the last w inputs, (R, wC) -> (R, O), for each step."""

    def __init__(self, product: Callable[[Tensor], Tensor], window: Window) -> None:
        self.product = product
        self.window = window

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        return self.product(self.window.push(x, order))


class _InPairs:
    """Four products, (R, C) -> (R, O), for two steps."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], zeros: Tensor) -> None:
        self.products = products
        self.past = zeros, zeros  # the last two inputs
        self.rest: Tensor | None = None  # m_1 - m_2, between the two

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        multiply0, multiply1, multiply2, multiply3 = self.products
        (first, second), rest = self.past, self.rest
        if order is not None:
            first, second = first.index_select(0, order), second.index_select(0, order)
        self.past = second, x
        if rest is None:
            m1, m2 = multiply1(second + x), multiply2(x - second)
            self.rest = m1 - m2
            return multiply0(first - x).add_(m1).add_(m2)
        if order is not None:
            rest = rest.index_select(0, order)
        self.rest = None
        return multiply3(x - first).add_(rest)
