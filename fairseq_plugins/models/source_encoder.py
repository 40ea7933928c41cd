"""What the encoders of all families share: embeddings in, one `Source` out, re-ordered by index."""

from __future__ import annotations

from abc import abstractmethod

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from torch import Tensor

from fairseq_plugins.models.no_torch_script import NoTorchScript
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.source import Source

__all__ = ["SourceEncoder"]


class SourceEncoder(NoTorchScript, FairseqEncoder):
    """An encoder of B sentences of up to S tokens.

    Args:
        dictionary: source words.
        embedding: embeddings e of words and positions.
    """

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embedding = embedding
        embedding.dropout.module_name = type(self).__name__  # by which --retain-dropout-modules knows it

    @abstractmethod
    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, S, f), and true where there is no token (B, S), to keys and values, each (B, S, width)."""

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: object) -> Source:
        """Encode a batch.

        Args:
            src_tokens: (B, S), padded on either side.
            src_lengths: not used; the padding says the same.

        Raises:
            ValueError: a sentence is longer than `max_positions`.
        """
        self.refuse_tracing()
        padding_mask = src_tokens.eq(self.padding_idx)
        keys, values = self.encode(self.embedding(src_tokens), padding_mask)
        return Source(keys, values, padding_mask)

    def reorder_encoder_out(self, encoder_out: Source, new_order: Tensor) -> Source:
        """Rows in a new order; fairseq expands sentences to beams this way."""
        return encoder_out.reorder(new_order)

    def max_positions(self) -> int:
        """Longest source, in tokens."""
        return self.embedding.max_positions
