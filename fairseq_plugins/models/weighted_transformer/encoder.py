"""The encoder of the Weighted Transformer: embeddings and a stack of branched layers."""

from __future__ import annotations

from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.models.options import Options
from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.models.weighted_transformer.layers import EncoderLayer
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.source import padding_bias

__all__ = ["WeightedTransformerEncoder"]


class WeightedTransformerEncoder(SourceEncoder):
    """Self-attention and feed-forward networks in branches.

    Args:
        cfg: the model's options, complete.
        dictionary: source words.
        embedding: embeddings of words and positions.
    """

    def __init__(self, cfg: Options, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary, embedding)
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.encoder_layers))

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the last layer as keys and values, (B, S, d)."""
        x, bias = e, padding_bias(padding_mask, e.dtype).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, bias)
        return x, x
