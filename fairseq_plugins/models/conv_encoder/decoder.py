"""The LSTM decoder with attention (Gehring et al. 2016, section 2), all target positions at once.

B sentences, T target positions, S source positions, H units, f embedding width, V vocabulary.  Decoding step by step is
in `stepwise`.
"""

from __future__ import annotations

from fairseq.data import Dictionary
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.models.incremental import IncrementalDecoder
from fairseq_plugins.nn.attentive_lstm import AttentiveLSTM
from fairseq_plugins.nn.embedding import InputEmbedding
from fairseq_plugins.nn.source import Source

__all__ = ["LSTMDecoder"]


class LSTMDecoder(IncrementalDecoder):
    """An LSTM that attends, and more on top of it that do not.

    Args:
        dictionary: target words.
        embedding: embeddings g of words.
        hidden_size: H.
        layers: number of LSTMs.
        dropout: on the input of all layers but the first, and on the decoder's output.
    """

    def __init__(
        self, dictionary: Dictionary, embedding: InputEmbedding, hidden_size: int, layers: int, dropout: float
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)
        embed_dim = embedding.words.embedding_dim
        self.attentive = AttentiveLSTM(embed_dim, hidden_size)
        self.upper = nn.ModuleList(nn.LSTM(hidden_size, hidden_size, batch_first=True) for _ in range(layers - 1))
        self.to_embedding = nn.Linear(hidden_size, embed_dim)
        self.output_projection = nn.Linear(embed_dim, len(dictionary))

    def features(self, g: Tensor, source: Source) -> tuple[Tensor, Tensor | None]:
        """All positions at once: (B, T, f), and the attention."""
        h, a = self.attentive(g, source)
        for lstm in self.upper:
            h, _ = lstm(self.dropout(h))
        return self.dropout(self.to_embedding(h)), a if self.wants_attention else None
