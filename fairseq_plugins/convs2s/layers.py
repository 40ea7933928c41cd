"""Layers of ConvS2S: gated convolutions, shortcuts (sections 3.2 and 3.4), multi-step attention (section 3.3).

B sentences, T time steps or target positions, S source positions, C input width, D output width, w kernel width,
f embedding width, k hypotheses per sentence.  Convolutions have time first, like `torch.conv_tbc`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.decoding import KeptSentences
from fairseq_plugins.common.linear import WeightNormalisable, normalised_linear
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.cpu.convolution import as_matrix, convolve_time_first, with_window_layout
from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import BatchWeights

SQRT_HALF = math.sqrt(0.5)


class GatedConvolution(WeightNormalisable):
    """A gated convolution: ``v([A B]) = A ⊗ σ(B)`` with ``[A B] = W * x + b``.

    For small inputs a gated linear unit divides the variance by four, and dropout with retain probability p multiplies
    it by 1/p.  Therefore weights start from N(0, √(4p/n)) for n inputs (section 3.5 and appendix A).

    Args:
        in_dim: C.
        out_dim: D; the convolution has 2·D output channels.
        kernel: w, odd or even.
        causal: whether a position sees only itself and the w-1 previous positions; otherwise the window is
            centred, with the longer half on the right if w is even.
        retain: p.

    Attributes:
        packing: packed weights of a batch, see `linear`; set by `with_packing`.
    """

    packing: BatchWeights | None = None

    def __init__(self, in_dim: int, out_dim: int, kernel: int, causal: bool, retain: float = 1.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.padding = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.register_parameter("weight", nn.Parameter(torch.empty(kernel, in_dim, 2 * out_dim)))
        self.bias = nn.Parameter(torch.zeros(2 * out_dim))
        nn.init.normal_(self.weight, mean=0, std=math.sqrt(4 * retain / (kernel * in_dim)))
        self.normalise_weight_(dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all positions: (T, B, C) -> (T, B, D)."""
        return F.glu(convolve_time_first(x, self.weight, self.bias, self.padding, self.packing), dim=-1)

    def of_windows(self, windows: Tensor) -> Tensor:
        """Compute the outputs of given windows, each with its w inputs concatenated: (..., wC) -> (..., D)."""
        return F.glu(linear(windows, self.matrix, self.bias, self.packing), dim=-1)

    @property
    def matrix(self) -> Tensor:
        """Weight of the convolution as a linear map of flattened windows, (2D, wC), as a view."""
        return as_matrix(self.weight)

    def remove_weight_norm_(self) -> None:
        """Replace the normalised weight by its value, in a layout that makes `matrix` contiguous."""
        super().remove_weight_norm_()
        self.weight.data = with_window_layout(self.weight.data)


class Shortcut(nn.Module):
    """A residual connection from ``distance`` layers back, with a linear map if widths differ.

    Args:
        distance: 1 for the layer's own input, 0 for no connection.
        from_dim: width at the start.
        to_dim: width at the end.
    """

    def __init__(self, distance: int, from_dim: int, to_dim: int) -> None:
        super().__init__()
        self.distance = distance
        widens = distance > 0 and from_dim != to_dim
        self.projection = normalised_linear(from_dim, to_dim) if widens else None

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Return √½ times the sum of x and an earlier output; √½ keeps the variance (section 3.4).

        Args:
            x: result of this layer, (..., to_dim).
            outputs: input of the stack, and outputs of the previous layers.
        """
        if self.distance == 0:
            return x
        residual = outputs[-self.distance]
        if self.projection is not None:
            residual = self.projection(residual)
        return (x + residual) * SQRT_HALF


class MultiStepAttention(nn.Module):
    """The attention of one decoder layer.

    Args:
        dim: C, width of the layer.
        embed_dim: f, width of embeddings and encoder output.
    """

    def __init__(self, dim: int, embed_dim: int) -> None:
        super().__init__()
        self.in_projection = normalised_linear(dim, embed_dim)
        self.out_projection = normalised_linear(embed_dim, dim)

    def forward(self, h: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Compute equations 1 and 2 of section 3.3, and add h; √½ keeps the variance of each sum.

        Args:
            h: result of the layer, (B, T, C).
            g: embeddings of the previous target tokens, (B, T, f).
            source: z as keys and √½ (z + e) as values.

        Returns:
            ``√½ (h + W_o c + b_o)``, (B, T, C), and the attention a, (B, T, S).
        """
        d = (self.in_projection(h) + g) * SQRT_HALF
        a = softmax(torch.baddbmm(source.bias, d, source.keys.transpose(1, 2)))
        # A uniform average of m inputs divides their standard deviation by √m, which this factor restores.
        c = torch.bmm(a, source.values) * source.sqrt_lengths
        return (h + self.out_projection(c)) * SQRT_HALF, a


class ProjectedAttention:
    """Multi-step attention with both projections applied to the source, once per sentence.

    With d = √½ (W_d h + b_d + g), d·z = √½ (h·(W_dᵀ z) + b_d·z + g·z); and W_o Σ a_j v_j = Σ a_j W_o v_j, with its √m.
    g·z has no parameter of the layer, so the caller computes it once for all layers.

    Args:
        attention: the layer, with plain weights.
        source: encoder output, one entry per sentence.
        packing: packed weights, see `linear`.
    """

    def __init__(self, attention: MultiStepAttention, source: Source, packing: BatchWeights | None) -> None:
        w_d, b_d = attention.in_projection.weight, attention.in_projection.bias
        w_o, b_o = attention.out_projection.weight, attention.out_projection.bias
        # Contiguous columns, (B, C, S), make the product with the few rows of a step several times faster.
        self.keys = linear(source.keys, w_d.t(), None, packing).transpose(1, 2).contiguous()
        self.score_bias = (torch.matmul(source.keys, b_d) * SQRT_HALF).unsqueeze(1)  # (B, 1, S)
        # The weights of an average sum to one, so the bias can be added to each value.
        values = linear(source.values, w_o, None, packing)
        self.values = torch.addcmul(b_o * SQRT_HALF, values, source.sqrt_lengths, value=SQRT_HALF)  # (B, S, C)

    def keep(self, kept: KeptSentences) -> None:
        """Keep only these sentences."""
        self.keys, self.score_bias, self.values = map(kept.of, (self.keys, self.score_bias, self.values))

    def attend(self, h: Tensor, gz: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `MultiStepAttention.forward`, with the hypotheses of a sentence as time steps.

        Args:
            h: (B, k, C).
            gz: √½ g·z, minus infinity at padding, (B, k, S).
        """
        a = softmax(torch.baddbmm(gz + self.score_bias, h, self.keys, alpha=SQRT_HALF))
        return torch.baddbmm(h, a, self.values, beta=SQRT_HALF), a
