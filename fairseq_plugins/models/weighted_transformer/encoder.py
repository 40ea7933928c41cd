"""The encoder of the Weighted Transformer: embeddings and a stack of branched layers."""

from __future__ import annotations

from argparse import Namespace

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from omegaconf import DictConfig
from torch import Tensor, nn

from fairseq_plugins.models.weighted_transformer.layers import EncoderLayer
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.source import Source

__all__ = ["WeightedTransformerEncoder"]


class WeightedTransformerEncoder(FairseqEncoder):
    """Self-attention and feed-forward networks in branches.

    Args:
        cfg: the model's options, complete.
        dictionary: source words.
        embedding: embeddings of words and positions.
    """

    def __init__(self, cfg: Namespace | DictConfig, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embedding = embedding
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.encoder_layers))

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: object) -> Source:
        """Encode a batch.

        Args:
            src_tokens: (B, S), padded on either side.
            src_lengths: not used; the padding says the same.

        Returns:
            the output of the last layer as keys and values, (B, S, d).

        Raises:
            ValueError: a sentence is longer than `max_positions`.
        """
        x = self.embedding(src_tokens)
        padding_mask = src_tokens.eq(self.padding_idx)
        bias = Source(x, x, padding_mask).bias.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, bias)
        return Source(x, x, padding_mask)

    def reorder_encoder_out(self, encoder_out: Source, new_order: Tensor) -> Source:
        """Rows in a new order; fairseq expands sentences to beams this way."""
        return encoder_out.reorder(new_order)

    def max_positions(self) -> int:
        """Longest source, in tokens."""
        return self.embedding.max_positions
