"""The pooling encoder (Gehring et al. 2016, section 3.1), which has no parameters but its embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.nn.embedding import InputEmbedding

__all__ = ["PoolingEncoder"]


class PoolingEncoder(SourceEncoder):
    """Averages of neighbouring embeddings are scored, and the embeddings themselves averaged.

    Args:
        dictionary: source words.
        embedding: embeddings e of words and positions.
        width: k, odd.

    Raises:
        ValueError: the width is not a positive odd number.
    """

    def __init__(self, dictionary: Dictionary, embedding: InputEmbedding, width: int) -> None:
        super().__init__(dictionary, embedding)
        if width < 1 or width % 2 == 0:
            raise ValueError(f"--pooling-width: a window around a word has an odd number of words, but got {width}")
        self.width = width

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """``z_j = 1/k Σ_t e_{j+t}``, zeros outside the sentence, and e, each (B, S, f)."""
        columns = e.masked_fill(padding_mask.unsqueeze(-1), 0).transpose(1, 2)
        z = F.avg_pool1d(columns, self.width, stride=1, padding=self.width // 2)
        return z.transpose(1, 2), e
