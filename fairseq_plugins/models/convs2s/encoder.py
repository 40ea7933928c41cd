"""The convolutional encoder of ConvS2S (Gehring et al. 2017, sections 3.1, 3.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq.data import Dictionary
from fairseq.modules import FairseqDropout, GradMultiply
from torch import Tensor, nn

from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.gated_convolution import SQRT_HALF, GatedConvolution, Shortcut
from fairseq_plugins.nn.initialisation import with_weight_norm
from fairseq_plugins.nn.layer_list import ConvolutionSpec, input_widths

__all__ = ["ConvS2SEncoder"]


class ConvS2SEncoder(SourceEncoder):
    """Gated convolutions over the source.

    Args:
        dictionary: source words.
        embedding: embeddings e of words and positions.
        convolutions: the layers, from the input up.
        dropout: on the input of each convolution.
        attention_layers: how many decoder layers attend, each of which sends back a gradient.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        convolutions: Sequence[ConvolutionSpec],
        dropout: float,
        attention_layers: int,
    ) -> None:
        super().__init__(dictionary, embedding)
        # Section 3.4 divides by the number of attentions; the authors' own code, as fairseq, by twice that.
        self.gradient_scale = 1.0 / (2.0 * attention_layers)
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)

        retain = 1 - dropout
        embed_dim = embedding.words.embedding_dim
        self.from_embedding = with_weight_norm(nn.Linear(embed_dim, convolutions[0].width), retain)
        self.convolutions = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        for (width, kernel, residual), (inputs, start) in zip(convolutions, input_widths(convolutions), strict=True):
            self.convolutions.append(GatedConvolution(inputs, width, kernel, causal=False, retain=retain))
            self.shortcuts.append(Shortcut(residual, start, width))
        self.to_embedding = with_weight_norm(nn.Linear(width, embed_dim))

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Keys z and values (z + e)√½, each (B, S, f)."""
        padding = padding_mask.t().unsqueeze(-1)  # (S, B, 1)
        z = self.from_embedding(e).transpose(0, 1)  # (S, B, C): time first for the convolutions
        outputs = [z]
        for convolution, shortcut in zip(self.convolutions, self.shortcuts, strict=True):
            # Outside the sentence a convolution sees zeros, as it does beyond the ends of the batch.
            z = convolution(self.dropout(z.masked_fill(padding, 0)))
            z = shortcut(z, outputs)
            outputs.append(z)
        z = self.to_embedding(z).masked_fill(padding, 0).transpose(0, 1).contiguous()  # (B, S, f), read by every layer

        z = GradMultiply.apply(z, self.gradient_scale)
        return z, (z + e) * SQRT_HALF
