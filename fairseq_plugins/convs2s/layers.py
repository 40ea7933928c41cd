"""Layers of ConvS2S: gated convolutions, shortcuts (sections 3.2 and 3.4), multi-step attention (section 3.3).

B sentences, T time steps or target positions, S source positions, C input width, D output width, w kernel width,
f embedding width, k hypotheses per sentence.  Time is the first dimension in convolutions, as in `torch.conv_tbc`.
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

    A gated linear unit divides the variance of small inputs by four.  Dropout that retains inputs with probability p
    multiplies the variance by 1/p.  To keep the variance, initial weights for n inputs have the standard deviation
    √(4p/n) (section 3.5 and appendix A).

    Args:
        in_dim: C.
        out_dim: D; the convolution has 2·D output channels.
        kernel: w, odd or even.
        causal: whether an output depends only on its own position and the w - 1 previous positions.  Otherwise the
            window is centred; if w is even, it has one more position on the right.
        retain: p.

    Attributes:
        packing: packed weights of the current batch, set by `with_packing`.
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
        """Compute one output for each window, given as w concatenated inputs: (..., wC) -> (..., D)."""
        return F.glu(linear(windows, self.matrix, self.bias, self.packing), dim=-1)

    @property
    def matrix(self) -> Tensor:
        """A view of the weight as the matrix that maps flattened windows to outputs, (2D, wC)."""
        return as_matrix(self.weight)

    def remove_weight_norm_(self) -> None:
        """Replace the normalised weight by its value, in the memory layout for which `matrix` is contiguous."""
        super().remove_weight_norm_()
        self.weight.data = with_window_layout(self.weight.data)


class Shortcut(nn.Module):
    """A residual connection that spans ``distance`` layers, with a linear map if the widths at its ends differ.

    Args:
        distance: number of layers that the connection spans: 1 if it starts at the layer's own input, 0 for no
            connection.
        from_dim: width at the start of the connection.
        to_dim: width at the end of the connection.
    """

    def __init__(self, distance: int, from_dim: int, to_dim: int) -> None:
        super().__init__()
        self.distance = distance
        widens = distance > 0 and from_dim != to_dim
        self.projection = normalised_linear(from_dim, to_dim) if widens else None

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Add an earlier output to x; the factor √½ keeps the variance of the sum (section 3.4).

        Args:
            x: output of this layer before the connection, (..., to_dim).
            outputs: input of the first layer, and outputs of all previous layers.
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
        """Attend to the source by equations 1 and 2 of section 3.3, and add h; the factor √½ keeps a sum's variance.

        Args:
            h: output of the layer's convolution, (B, T, C).
            g: embeddings of the previous target tokens, (B, T, f).
            source: encoder output, with z as keys and √½ (z + e) as values.

        Returns:
            ``√½ (h + W_o c + b_o)``, (B, T, C), and the attention a, (B, T, S).
        """
        d = (self.in_projection(h) + g) * SQRT_HALF
        a = softmax(torch.baddbmm(source.bias, d, source.keys.transpose(1, 2)))
        # The average of m values has a standard deviation 1/√m times as large; multiplying by √m restores it.
        c = torch.bmm(a, source.values) * source.sqrt_lengths
        return (h + self.out_projection(c)) * SQRT_HALF, a


class ProjectedAttention:
    """Multi-step attention that applies both projections to the source, once per sentence, instead of to each state.

    The scores are d·z = √½ (h·(W_dᵀ z) + b_d·z + g·z) for d = √½ (W_d h + b_d + g).  The output is
    W_o Σ a_j v_j = Σ a_j (W_o v_j), times √m.  Therefore W_dᵀ z, b_d·z and √m W_o v_j are computed once.  The term g·z
    does not depend on the layer, so the caller computes it once for all layers.

    Args:
        attention: attention module without weight normalisation.
        source: encoder output, one entry per sentence.
        packing: packed weights of the batch.
    """

    def __init__(self, attention: MultiStepAttention, source: Source, packing: BatchWeights | None) -> None:
        w_d, b_d = attention.in_projection.weight, attention.in_projection.bias
        w_o, b_o = attention.out_projection.weight, attention.out_projection.bias
        # With the layout (B, C, S), the product with the few rows of a step is several times faster.
        self.keys = linear(source.keys, w_d.t(), None, packing).transpose(1, 2).contiguous()
        self.score_bias = (torch.matmul(source.keys, b_d) * SQRT_HALF).unsqueeze(1)  # (B, 1, S)
        # Attention weights sum to one, so adding b_o to each value is the same as adding it to the average.
        values = linear(source.values, w_o, None, packing)
        self.values = torch.addcmul(b_o * SQRT_HALF, values, source.sqrt_lengths, value=SQRT_HALF)  # (B, S, C)

    def keep(self, kept: KeptSentences) -> None:
        """Drop all sentences except ``kept``."""
        self.keys, self.score_bias, self.values = map(kept.of, (self.keys, self.score_bias, self.values))

    def attend(self, h: Tensor, gz: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `MultiStepAttention.forward` for one step; the second dimension is hypotheses, not time.

        Args:
            h: output of the layer's convolution, (B, k, C).
            gz: √½ g·z, and minus infinity at padding, (B, k, S).
        """
        a = softmax(torch.baddbmm(gz + self.score_bias, h, self.keys, alpha=SQRT_HALF))
        return torch.baddbmm(h, a, self.values, beta=SQRT_HALF), a
