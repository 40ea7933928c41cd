"""The layers of ConvS2S: gated convolutions, shortcuts (sections 3.2 and 3.4), multi-step attention (section 3.3).

B sentences, T time steps or target positions, S source positions, C input width, D output width, w kernel width,
f embedding width, k beams.  Convolutions have time first, as `torch.conv_tbc`.
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
from fairseq_plugins.cpu.convolution import as_matrix, convolve_time_first, lay_out
from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import BatchPacking

SQRT_HALF = math.sqrt(0.5)


class GatedConvolution(WeightNormalisable):
    """``v([A B]) = A ⊗ σ(B)`` over ``[A B] = W * x + b``, one output for each input position.

    A gated linear unit divides the variance by four for small inputs, and dropout with retain probability p multiplies
    it by 1/p, so weights start from N(0, √(4p/n)) for n inputs (section 3.5 and appendix A).

    Args:
        in_dim: C.
        out_dim: D; the convolution itself has 2D outputs.
        kernel: w, odd or even.
        causal: whether a position sees only itself and the w-1 positions before it; else the window is centred, the
            longer half to the right when w is even.
        retain: p.

    Attributes:
        packing: as of `linear`; set by `with_packing`.
    """

    packing: BatchPacking | None = None

    def __init__(self, in_dim: int, out_dim: int, kernel: int, causal: bool, retain: float = 1.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.padding = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.register_parameter("weight", nn.Parameter(torch.empty(kernel, in_dim, 2 * out_dim)))
        self.bias = nn.Parameter(torch.zeros(2 * out_dim))
        nn.init.normal_(self.weight, mean=0, std=math.sqrt(4 * retain / (kernel * in_dim)))
        self.normalise_weight_(dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """All positions at once: (T, B, C) -> (T, B, D)."""
        return F.glu(convolve_time_first(x, self.weight, self.bias, self.padding, self.packing), dim=-1)

    def of_windows(self, windows: Tensor) -> Tensor:
        """Outputs of any positions, each from its w inputs side by side: (..., wC) -> (..., D)."""
        return F.glu(linear(windows, self.matrix, self.bias, self.packing), dim=-1)

    @property
    def matrix(self) -> Tensor:
        """The convolution at one position as a linear map of its flattened window, (2D, wC); a view of the weight."""
        return as_matrix(self.weight)

    def remove_weight_norm_(self) -> None:
        """Replace the normalised weight by its value, in a memory layout in which `matrix` is contiguous."""
        super().remove_weight_norm_()
        self.weight.data = lay_out(self.weight.data)


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
        self.projection = normalised_linear(from_dim, to_dim) if widens else None

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Return the sum of x and an earlier output, times √½, which keeps the variance (section 3.4).

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


class MultiStepAttention(nn.Module):
    """The attention of one decoder layer.

    Args:
        dim: C, width of the layer.
        embed_dim: f, width of the embeddings and of the encoder's output.
    """

    def __init__(self, dim: int, embed_dim: int) -> None:
        super().__init__()
        self.in_projection = normalised_linear(dim, embed_dim)
        self.out_projection = normalised_linear(embed_dim, dim)

    def forward(self, h: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Equations 1 and 2 of section 3.3, and their sum with the layer's result; √½ keeps the variance of each sum.

        Args:
            h: the layer's result, (B, T, C).
            g: embeddings of the previous target tokens, (B, T, f).
            source: z as keys and √½ (z + e) as values.

        Returns:
            ``√½ (h + W_o c + b_o)``, (B, T, C), and the attention a, (B, T, S).
        """
        d = (self.in_projection(h) + g) * SQRT_HALF
        a = softmax(torch.baddbmm(source.bias, d, source.keys.transpose(1, 2)))
        # A uniform average over m inputs divides their deviation by √m; the authors multiply it back.
        c = torch.bmm(a, source.values) * source.sqrt_lengths
        return (h + self.out_projection(c)) * SQRT_HALF, a


class ProjectedAttention:
    """The same attention with both projections moved to the source, where they are computed once per sentence.

    With d = √½ (W_d h + b_d + g), d·z = √½ (h·(W_dᵀ z) + b_d·z + g·z); and W_o Σ a_j v_j = Σ a_j W_o v_j, with its √m.
    g·z is the same for all layers (no parameter of `MultiStepAttention` is in it), so the caller passes it.

    Args:
        attention: the layer, with plain weights.
        source: one entry per sentence.
        packing: as in `linear`.
    """

    def __init__(self, attention: MultiStepAttention, source: Source, packing: BatchPacking | None) -> None:
        w_d, b_d = attention.in_projection.weight, attention.in_projection.bias
        w_o, b_o = attention.out_projection.weight, attention.out_projection.bias
        # As contiguous columns, (B, C, S): a product of the few rows of a step then takes a fraction of the time.
        self.keys = linear(source.keys, w_d.t(), None, packing).transpose(1, 2).contiguous()
        self.score_bias = (torch.matmul(source.keys, b_d) * SQRT_HALF).unsqueeze(1)  # (B, 1, S)
        # The weights of an average sum to one, so a constant of each value can be added to the average.
        values = linear(source.values, w_o, None, packing)
        self.values = torch.addcmul(b_o * SQRT_HALF, values, source.sqrt_lengths, value=SQRT_HALF)  # (B, S, C)

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        self.keys, self.score_bias, self.values = map(kept.of, (self.keys, self.score_bias, self.values))

    def attend(self, h: Tensor, gz: Tensor) -> tuple[Tensor, Tensor]:
        """As `MultiStepAttention.forward`, with the beams of a sentence as time steps.

        Args:
            h: (B, k, C).
            gz: √½ g·z, minus infinity at padding, (B, k, S).
        """
        a = softmax(torch.baddbmm(gz + self.score_bias, h, self.keys, alpha=SQRT_HALF))
        return torch.baddbmm(h, a, self.values, beta=SQRT_HALF), a
