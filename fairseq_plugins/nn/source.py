"""What a decoder attends to: one entry per sentence, however many beams read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Source", "padding_bias"]


@dataclass(frozen=True)
class Source:
    """The encoder's output for B sentences of up to S tokens.

    Attributes:
        keys: (B, S, f), what queries are compared with.
        values: (B, S, f), what is averaged.
        padding_mask: (B, S), true where there is no token.
        rows: the sentence of each decoder row, (rows,); None while each sentence has exactly one row.
    """

    keys: Tensor
    values: Tensor
    padding_mask: Tensor
    rows: Tensor | None = None

    @cached_property
    def sqrt_lengths(self) -> Tensor:
        """√m, with m the true length of each sentence, (B, 1, 1)."""
        return self.padding_mask.logical_not().sum(dim=1).to(self.keys.dtype).sqrt().view(-1, 1, 1)

    @cached_property
    def bias(self) -> Tensor:
        """`padding_bias` of the source."""
        return padding_bias(self.padding_mask, self.keys.dtype)

    def reorder(self, new_order: Tensor) -> Source:
        """Rows in a new order.  Nothing is copied: only the index is composed."""
        return replace(self, rows=new_order if self.rows is None else self.rows.index_select(0, new_order))

    def select(self, sentences: Tensor) -> Source:
        """Only the given sentences, one row each."""
        return Source(*(part.index_select(0, sentences) for part in (self.keys, self.values, self.padding_mask)))

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
        return replace(self, rows=None), beam


def padding_bias(padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, (B, S) -> (B, 1, S): minus infinity where there is no token, zero elsewhere."""
    zeros = torch.zeros(padding_mask.shape, dtype=dtype, device=padding_mask.device)
    return zeros.masked_fill_(padding_mask, float("-inf")).unsqueeze(1)
