"""The convolutional decoder of ConvS2S (Gehring et al. 2017, sections 3.1 to 3.4), all target positions at once.

B sentences, T target positions, S source positions, C layer width, f embedding width, V vocabulary.  Attention stands
between a layer's gate and its residual connection (docs/decisions.md).  Decoding step by step is `ConvS2SDecoding`, in
`stepwise`, which `model` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.gated_convolution import GatedConvolution, Shortcut
from fairseq_plugins.nn.initialisation import with_weight_norm
from fairseq_plugins.nn.layer_list import ConvolutionSpec, input_widths
from fairseq_plugins.nn.multi_step_attention import MultiStepAttention
from fairseq_plugins.nn.prefix_tree import PrefixTree
from fairseq_plugins.nn.source import Source

__all__ = ["ConvS2SDecoder"]


class ConvS2SDecoder(IncrementalDecoder):
    """Causal gated convolutions, with attention after each or some of them.

    Args:
        dictionary: target words.
        embedding: embeddings g of words and positions.
        convolutions: the layers, from the input up.
        attends: for each layer, whether attention follows it.
        out_embed_dim: width in front of the projection to the vocabulary.
        dropout: on the input of each convolution, and on the decoder's output.
        tied: whether the projection to the vocabulary is the word embedding.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        convolutions: Sequence[ConvolutionSpec],
        attends: Sequence[bool],
        out_embed_dim: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)

        retain = 1 - dropout
        embed_dim = embedding.words.embedding_dim
        self.from_embedding = with_weight_norm(nn.Linear(embed_dim, convolutions[0].width), retain)
        self.convolutions = nn.ModuleList()
        self.attentions = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        widths = input_widths(convolutions)
        for (width, kernel, residual), (inputs, start), attend in zip(convolutions, widths, attends, strict=True):
            self.convolutions.append(GatedConvolution(inputs, width, kernel, causal=True, retain=retain))
            self.attentions.append(MultiStepAttention(width, embed_dim) if attend else None)  # type: ignore[arg-type]
            self.shortcuts.append(Shortcut(residual, start, width))
        self.to_embedding = with_weight_norm(nn.Linear(width, out_embed_dim))
        self.output_projection = nn.Linear(out_embed_dim, len(dictionary))
        if tied:
            nn.init.zeros_(self.output_projection.bias)
            self.output_projection.weight = embedding.words.weight
        else:
            with_weight_norm(self.output_projection, retain)

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """All positions at once: (B, T, out_embed_dim), and the attention averaged over the layers that attend."""
        h = self.from_embedding(g).transpose(0, 1)  # (T, B, C): time first for the convolutions
        outputs = [h]
        attention = []
        for convolution, attend, shortcut in self.layers:
            h = convolution(self.dropout(h))
            if attend is not None:
                h, a = attend(h.transpose(0, 1), g, source)
                h = h.transpose(0, 1)
                attention.append(a)
            h = shortcut(h, outputs)
            outputs.append(h)
        features = self.dropout(self.to_embedding(h.transpose(0, 1)))
        # The mean over the layers that attend, so that each row sums to one; fairseq divides by all layers.
        return features, torch.stack(attention).mean(dim=0) if self.wants_attention else None

    def features_of_prefixes(self, tree: PrefixTree, source: Source) -> Tensor:
        """The features of all prefixes of a batch, (M, out_embed_dim), in whatever order a tree has them.

        Raises:
            ValueError: a prefix is longer than the model's positions.
        """
        self.embedding.check_length(tree.nodes.size(1))
        g = self.embedding.step(tree.words, tree.positions)
        g_of_sentences = tree.by_sentence(g)
        h = self.from_embedding(g)
        outputs = [h]
        for convolution, attend, shortcut in self.layers:
            h = convolution.of_windows(tree.windows(self.dropout(h), convolution.kernel))
            if attend is not None:
                h = tree.flat(attend(tree.by_sentence(h), g_of_sentences, source)[0])
            h = shortcut(h, outputs)
            outputs.append(h)
        return self.dropout(self.to_embedding(h))

    @property
    def layers(self) -> Iterator[tuple[GatedConvolution, MultiStepAttention | None, Shortcut]]:
        """The layers from the input up: convolution, attention where there is one, and residual connection."""
        layers: Any = zip(self.convolutions, self.attentions, self.shortcuts, strict=True)
        return layers
