"""Word and position embeddings at the input of an encoder or decoder."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn

from fairseq_plugins.cpu.dropout_and_loss import Dropout


class InputEmbedding(nn.Module):
    """The sum of word and position embeddings, ``e = w + p`` (ConvS2S section 3.1), with dropout.

    Args:
        words: word embeddings w; their ``padding_idx`` is the index of padding in the input.
        max_positions: maximum number of tokens in a sentence; positions do not count padding.
        positions: kind of position embeddings: ``learned``, ``sinusoidal`` (Vaswani et al. 2017, section 3.5) or None.
        dropout: probability of dropping an element.
        scale: number that word embeddings are multiplied by.
    """

    table: Tensor

    def __init__(
        self, words: nn.Embedding, max_positions: int, positions: str | None, dropout: float, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.words = words
        self.max_positions = max_positions
        self.scale = scale
        assert words.padding_idx is not None
        self.padding_idx = words.padding_idx
        # fairseq's first position has the index padding_idx + 1, so the table needs padding_idx + 1 additional rows.
        size = (max_positions + self.padding_idx + 1, words.embedding_dim, self.padding_idx)
        self.positions = normal_embedding(*size) if positions == "learned" else None
        if positions == "sinusoidal":
            self.register_buffer("table", SinusoidalPositionalEmbedding.get_embedding(*size), persistent=False)
        self.positional = positions is not None
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed whole sentences, padded on either side, (B, T) -> (B, T, f)."""
        x = self._embed_words(tokens)
        if self.positional:
            if tokens.size(1) > self.max_positions:
                # A batch may be wider than its longest sentence, so count the tokens that are not padding.
                self.check_length(int(tokens.ne(self.padding_idx).sum(dim=1).max()))
            x = x + F.embedding(utils.make_positions(tokens, self.padding_idx), self.position_rows(), self.padding_idx)
        return self.dropout(x)

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Embed one token per row, (rows,) -> (rows, f).

        ``position`` is counted from zero; its shape is (1,) if all rows have the same position, otherwise (rows,).  The
        caller must first call `check_length`, because a check in this method would synchronise with the device.
        """
        x = self._embed_words(tokens)
        if self.positional:
            x = x + self.position_rows().index_select(0, position + (self.padding_idx + 1))
        return self.dropout(x)

    def check_length(self, length: int) -> None:
        """Refuse a sentence with more tokens than the model has positions."""
        if self.positional and length > self.max_positions:
            raise ValueError(
                f"a sentence of {length} tokens exceeds the model's {self.max_positions} positions: shorten it"
            )

    def _embed_words(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        return x if self.scale == 1.0 else x * self.scale

    def position_rows(self) -> Tensor:
        """Return the table of position embeddings, (rows, f), where position p has the row ``padding_idx + 1 + p``."""
        return self.table if self.positions is None else self.positions.weight


def pretrained_embedding(dictionary: Dictionary, dim: int, path: str | None, option: str) -> nn.Embedding:
    """Return embeddings of width ``dim`` from a file; words that the file lacks get random embeddings.

    The file has a header and lines ``word number number ...``.  ``path`` is the value of the command-line ``option``.
    """
    embedding = normal_embedding(len(dictionary), dim, dictionary.pad())
    if path is None:
        return embedding
    if not Path(path).is_file():
        raise ValueError(f"{option} {path}: the file does not exist; check the path")
    try:
        vectors = utils.parse_embedding(path)
    except (ValueError, StopIteration) as error:
        raise ValueError(
            f"{option} {path}: not a file of embeddings ({error}); give lines of the form `word number ...`"
        ) from error
    for word, vector in vectors.items():
        if vector.numel() != dim:
            raise ValueError(
                f"{option} {path}: {word!r} has {vector.numel()} numbers, expected {dim}; give another file or "
                f"{option.replace('-path', '-dim')}"
            )
    utils.print_embed_overlap(vectors, dictionary)
    return utils.load_embedding(vectors, dictionary, embedding)


def normal_embedding(num_embeddings: int, embedding_dim: int, padding_idx: int, std: float = 0.1) -> nn.Embedding:
    """Return normally distributed embeddings, with zeros for padding; ConvS2S has the standard deviation 0.1."""
    embedding = nn.Embedding(num_embeddings, embedding_dim, padding_idx=padding_idx)
    nn.init.normal_(embedding.weight, mean=0, std=std)
    nn.init.zeros_(embedding.weight[padding_idx])
    return embedding
