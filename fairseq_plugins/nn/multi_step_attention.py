"""Multi-step attention (ConvS2S sections 3.3 and 3.4), and the form in which a sentence's part is computed once.

B sentences, T target positions, S source positions, C layer width, f embedding width, k beams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.nn.decoder_state import KeptSentences
from fairseq_plugins.nn.gated_convolution import SQRT_HALF
from fairseq_plugins.nn.initialisation import with_weight_norm
from fairseq_plugins.nn.softmax import softmax
from fairseq_plugins.nn.source import Source

__all__ = ["MultiStepAttention", "ProjectedAttention"]


class MultiStepAttention(nn.Module):
    """The attention of one decoder layer.

    Args:
        dim: C, width of the layer.
        embed_dim: f, width of the embeddings and of the encoder's output.
    """

    def __init__(self, dim: int, embed_dim: int) -> None:
        super().__init__()
        self.in_projection = with_weight_norm(nn.Linear(dim, embed_dim))
        self.out_projection = with_weight_norm(nn.Linear(embed_dim, dim))

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
    g·z is the same for all layers (`MultiStepAttention` has no part of its own in it), so the caller passes it.

    Args:
        attention: the layer, with plain weights.
        source: one entry per sentence.
        linear: torch's, or what a backend has for it.
    """

    def __init__(
        self, attention: MultiStepAttention, source: Source, linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    ) -> None:
        w_d, b_d = attention.in_projection.weight, attention.in_projection.bias
        w_o, b_o = attention.out_projection.weight, attention.out_projection.bias
        # As columns, (B, C, S), and laid out so: a product of the few rows of a step then takes a fraction of the time.
        self.keys = linear(source.keys, w_d.t()).transpose(1, 2).contiguous()
        self.score_bias = (torch.matmul(source.keys, b_d) * SQRT_HALF).unsqueeze(1)  # (B, 1, S)
        # The weights of an average sum to one, so what is added to each value is added to the average.
        values = linear(source.values, w_o)
        self.values = torch.addcmul(b_o * SQRT_HALF, values, source.sqrt_lengths, value=SQRT_HALF)  # (B, S, C)

    def keep(self, kept: KeptSentences) -> None:
        """Go on with these sentences only."""
        self.keys, self.score_bias, self.values = map(kept.of, (self.keys, self.score_bias, self.values))

    def attend(self, h: Tensor, gz: Tensor) -> tuple[Tensor, Tensor]:
        """As `MultiStepAttention.forward`, with beams in the place of time.

        Args:
            h: (B, k, C).
            gz: √½ g·z, minus infinity at padding, (B, k, S).
        """
        a = softmax(torch.baddbmm(gz + self.score_bias, h, self.keys, alpha=SQRT_HALF))
        return torch.baddbmm(h, a, self.values, beta=SQRT_HALF), a
