"""The recurrent encoders that the paper compares with (Gehring et al. 2016, section 2, after Zhou et al. 2016)."""

from __future__ import annotations

import torch
from fairseq.data import Dictionary
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from fairseq_plugins.models.source_encoder import SourceEncoder
from fairseq_plugins.nn.embedding import InputEmbedding

__all__ = ["LSTMEncoder"]


class LSTMEncoder(SourceEncoder):
    """A stack of LSTMs; or two, one of which begins at the end, and whose layers read by turns in either direction.

    Args:
        dictionary: source words.
        embedding: embeddings e of words.
        hidden_size: units of an LSTM.
        layers: number of LSTMs in each stack.
        dropout: on the input of all layers but the first, and on the output.
        bidirectional: two stacks.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embedding: InputEmbedding,
        hidden_size: int,
        layers: int,
        dropout: float,
        bidirectional: bool,
    ) -> None:
        super().__init__(dictionary, embedding)
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)
        embed_dim = embedding.words.embedding_dim
        sizes = [embed_dim] + [hidden_size] * (layers - 1)
        self.stacks = nn.ModuleList(
            nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
            for _ in range(2 if bidirectional else 1)
        )
        self.to_embedding = nn.Linear(len(self.stacks) * hidden_size, embed_dim, bias=False)

    def encode(self, e: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Top-level states of all stacks side by side, mapped to (B, S, f), as keys and as values.

        An LSTM gets its sentences from the first column on, so that padding comes when all has been read; reversing
        them by index then takes neither packed sequences nor a look at their lengths.
        """
        tokens = padding_mask.logical_not().to(torch.long)
        first = tokens.argmax(dim=1, keepdim=True)  # column of the first token
        last = tokens.sum(dim=1, keepdim=True) - 1
        column = torch.arange(tokens.size(1), device=tokens.device)
        reverse = (last - column) % tokens.size(1)

        forward = _take(e, (first + column) % tokens.size(1))
        tops = []
        for start, stack in enumerate(self.stacks):
            x, reversed_ = forward, False
            for number, lstm in enumerate(stack.children()):
                x = self.dropout(x) if number > 0 else x
                backwards = len(self.stacks) == 2 and (start + number) % 2 == 1
                x = lstm(_take(x, reverse) if backwards != reversed_ else x)[0]
                reversed_ = backwards
            tops.append(_take(x, reverse) if reversed_ else x)
        z = self.dropout(self.to_embedding(torch.cat(tops, dim=-1)))
        z = _take(z, (column - first) % tokens.size(1))
        return z, z


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Row i of the result is ``x[i, columns[i]]``: (B, S, width) and (B, S) -> (B, S, width)."""
    return x.gather(1, columns.unsqueeze(-1).expand_as(x))
