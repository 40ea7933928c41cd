"""The decoder of the Weighted Transformer, all target positions at once; step by step is in `stepwise`."""

from __future__ import annotations

from typing import cast

from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.models.options import Options
from fairseq_plugins.models.weighted_transformer.layers import DecoderLayer
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.prefix_tree import PrefixTree
from fairseq_plugins.nn.source import Source

__all__ = ["WeightedTransformerDecoder"]


class WeightedTransformerDecoder(IncrementalDecoder):
    """Causal self-attention, and branched attention to the source.

    Args:
        cfg: the model's options, complete.
        dictionary: target words.
        embedding: embeddings of words and positions.
        output_projection: to the vocabulary.
    """

    def __init__(
        self, cfg: Options, dictionary: Dictionary, embedding: InputEmbedding, output_projection: nn.Linear
    ) -> None:
        super().__init__(dictionary, embedding)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.output_projection = output_projection

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """All positions at once: (B, T, d), and the last layer's attention to the source, averaged over its heads.

        Targets are padded on the right, or not at all: what follows a token does not count for it.
        """
        x = g
        for layer in self.layers:
            x, query = layer(x, source)
        if not self.wants_attention:
            return x, None
        heads = cast(DecoderLayer, layer).source_attention
        return x, heads.weights(query, source.keys, source.bias.unsqueeze(1)).mean(dim=1)

    def features_of_prefixes(self, tree: PrefixTree, source: Source) -> Tensor:
        """The features of all prefixes of a batch, (M, d), in whatever order a tree has them.

        Raises:
            ValueError: a prefix is longer than the model's positions.
        """
        self.embedding.check_length(tree.nodes.size(1))
        x = tree.by_sentence(self.embedding.step(tree.words, tree.positions))
        seen = tree.bias(x.dtype)
        for layer in self.layers:
            x, _ = layer(x, source, seen)
        return tree.flat(x)
