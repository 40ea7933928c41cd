"""Gated convolutions and the shortcuts around them (ConvS2S sections 3.2 and 3.4).

T time steps, B sentences, C input width, D output width, w kernel width.  Time comes first, as `torch.conv_tbc` wants
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.nn.initialisation import with_weight_norm
from fairseq_plugins.nn.weight_norm import weight_norm

__all__ = ["SQRT_HALF", "GatedConvolution", "Shortcut"]

SQRT_HALF = math.sqrt(0.5)


class GatedConvolution(nn.Module):
    """``v([A B]) = A ⊗ σ(B)`` over ``[A B] = W * x + b``, one output for each input position.

    Args:
        in_dim: C.
        out_dim: D; the convolution itself has 2D outputs.
        kernel: w, odd or even.
        causal: whether a position sees only itself and the w-1 positions before it; else the window is centred, the
            longer half to the right when w is even.
        retain: probability with which dropout retains each input, for the initialisation N(0, √(4p/n)).
    """

    def __init__(self, in_dim: int, out_dim: int, kernel: int, causal: bool, retain: float = 1.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.padding = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.weight = nn.Parameter(torch.empty(kernel, in_dim, 2 * out_dim))
        self.bias = nn.Parameter(torch.zeros(2 * out_dim))
        nn.init.normal_(self.weight, mean=0, std=math.sqrt(4 * retain / (kernel * in_dim)))
        weight_norm(self, dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """All positions at once: (T, B, C) -> (T, B, D)."""
        return F.glu(self.convolve(x), dim=-1)

    def convolve(self, x: Tensor) -> Tensor:
        """``W * x + b``: (T, B, C) -> (T, B, 2D)."""
        x = F.pad(x, (0, 0, 0, 0, *self.padding))
        return torch.conv_tbc(x.contiguous(), self.weight, self.bias)

    linear: Callable[..., Tensor] = staticmethod(F.linear)

    def of_windows(self, windows: Tensor) -> Tensor:
        """Outputs of any positions, each from the w inputs that it sees, side by side: (..., wC) -> (..., D)."""
        return F.glu(self.linear(windows, self.matrix, self.bias), dim=-1)

    @property
    def matrix(self) -> Tensor:
        """The convolution at one position as a linear map of its flattened window, (2D, wC); a view of the weight."""
        return self.weight.flatten(0, 1).t()


class Shortcut(nn.Module):
    """A residual connection that starts ``distance`` layers back, with a linear map where widths differ.

    Args:
        distance: 1 for the layer's own input, 0 for no connection.
        from_dim: width where the connection starts.
        to_dim: width where it ends.
    """

    def __init__(self, distance: int, from_dim: int, to_dim: int) -> None:
        super().__init__()
        self.distance = distance
        widens = distance > 0 and from_dim != to_dim
        self.projection = with_weight_norm(nn.Linear(from_dim, to_dim)) if widens else None

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """The sum of x and an earlier output, times √½, which keeps the variance (section 3.4).

        Args:
            x: this layer's result, (..., to_dim).
            outputs: the stack's input and the outputs of the layers so far.
        """
        if self.distance == 0:
            return x
        residual = outputs[-self.distance]
        if self.projection is not None:
            residual = self.projection(residual)
        return (x + residual) * SQRT_HALF
