"""What a decoder attends to: one entry per sentence, however many beams read it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Source", "padding_bias"]


@dataclass
class Source:
    """The encoder's output for B sentences of up to S tokens.

    Attributes:
        keys: (B, S, f), what queries are compared with.
        values: (B, S, f), what is averaged.
        padding_mask: (B, S), true where there is no token.
        rows: the sentence of each decoder row, (rows,); None while each sentence has exactly one row.
        bias: `padding_bias` of the source, (B, 1, S).
        sqrt_lengths: √m, with m the true length of each sentence, (B, 1, 1).
    """

    keys: Tensor
    values: Tensor
    padding_mask: Tensor
    rows: Tensor | None = None
    bias: Tensor = field(init=False)
    sqrt_lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bias = padding_bias(self.padding_mask, self.keys.dtype)
        lengths = self.padding_mask.logical_not().sum(dim=1)
        self.sqrt_lengths = lengths.to(self.keys.dtype).sqrt().view(-1, 1, 1)

    def __getitem__(self, part: int) -> Tensor:
        """The first three: torch takes one where it hooks into a backward pass, as fairseq's search for NaNs does."""
        return (self.keys, self.values, self.padding_mask)[part]

    def reorder(self, new_order: Tensor) -> Source:
        """Rows in a new order.  Nothing is copied: only the index is composed."""
        return self._of_rows(new_order if self.rows is None else self.rows.index_select(0, new_order))

    def select(self, sentences: Tensor) -> Source:
        """Only the given sentences, one row each."""
        return Source(*(self[part].index_select(0, sentences) for part in range(3)))

    def expand(self) -> Source:
        """One entry per row, copied where rows share a sentence."""
        return self if self.rows is None else self.select(self.rows)

    def group(self) -> tuple[Source, int]:
        """One entry per sentence, and k, how many rows each has.

        Beam search keeps the rows of a sentence together and leaves every sentence k of them.  Where the rows are known
        not to be so, each becomes a sentence of its own: by their number, and on the CPU, where looking is free, by
        their order.  Elsewhere the device looks, and stops with an assertion.
        """
        if self.rows is None:
            return self, 1
        sentences, rows = self.keys.size(0), self.rows.numel()
        beam = rows // sentences
        if rows != beam * sentences or beam == 0:
            return self.expand(), 1
        together = torch.arange(rows, device=self.rows.device).div(beam, rounding_mode="floor").eq(self.rows).all()
        if together.device.type == "cpu" and not together:
            return self.expand(), 1
        torch._assert_async(together, "on a GPU decoder rows are k for each sentence, in the order of the sentences")
        return self._of_rows(None), beam

    def _of_rows(self, rows: Tensor | None) -> Source:
        other = copy(self)
        other.rows = rows
        return other


def padding_bias(padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, (B, S) -> (B, 1, S): minus infinity where there is no token, zero elsewhere."""
    zeros = torch.zeros(padding_mask.shape, dtype=dtype, device=padding_mask.device)
    return zeros.masked_fill_(padding_mask, float("-inf")).unsqueeze(1)
