"""The encoder's output, one entry per sentence however many beams read it, and the softmax of attention to it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Source:
    """The encoder's output for B sentences of up to S tokens.

    Attributes:
        keys: (B, S, f), compared with queries.
        values: (B, S, f), averaged.
        padding_mask: (B, S), true at padding.
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
        """Return one of the first three: torch's hooks of the backward pass, as in fairseq's NaN detector, take one."""
        return (self.keys, self.values, self.padding_mask)[part]

    def reorder(self, new_order: Tensor) -> Source:
        """Return the rows in a new order.  Nothing is copied: only the index is composed."""
        return self._of_rows(new_order if self.rows is None else self.rows.index_select(0, new_order))

    def select(self, sentences: Tensor) -> Source:
        """Return only the given sentences, one row each."""
        return Source(*(self[part].index_select(0, sentences) for part in range(3)))

    def expand(self) -> Source:
        """Return one entry per row, copied where rows share a sentence."""
        return self if self.rows is None else self.select(self.rows)

    def group(self) -> tuple[Source, int]:
        """Return one entry per sentence, and k, the number of rows that each has.

        Beam search keeps the rows of a sentence together and leaves every sentence k of them.  If the rows are known
        not to be so, each becomes a sentence of its own: by their number, and on the CPU, where looking is free, by
        their order.  On a GPU the device checks the order, and stops with an assertion.
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
    """Return the bias of attention scores, (B, S) -> (B, 1, S): minus infinity at padding, zero elsewhere."""
    zeros = torch.zeros(padding_mask.shape, dtype=dtype, device=padding_mask.device)
    return zeros.masked_fill_(padding_mask, float("-inf")).unsqueeze(1)


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, computed at least in float32: half precision loses small weights.

    Scores come rounded to the precision of the model.  With heads of 64 and scores of a standard deviation of 1 to 8
    an average is then 1.4 to 1.5 times as far from the exact one as by the rounding of queries, keys and values alone
    (float16: 0.06 to 0.12 % instead of 0.04 to 0.08 %; bfloat16: eight times that); keys in float32 are not worth it.
    """
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).type_as(scores)
