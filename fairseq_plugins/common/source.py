"""The encoder output, which all hypotheses of a sentence share, and the softmax of attention."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Source:
    """The encoder output for B sentences of up to S tokens.

    Attributes:
        keys: keys of the decoder's attention, (B, S, f).
        values: values of the decoder's attention, (B, S, f).
        padding_mask: true at padding, (B, S).
        rows: index of each decoder row's sentence, (rows,), or None if each sentence has one row.
        bias: result of `padding_bias`, (B, 1, S).
        sqrt_lengths: square root of each sentence's length without padding, (B, 1, 1).
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
        """Return keys (0), values (1) or padding mask (2).

        fairseq's NaN detector needs this method, because the detector indexes the outputs of modules.
        """
        return (self.keys, self.values, self.padding_mask)[part]

    def reorder(self, new_order: Tensor) -> Source:
        """Return the source with its rows in a new order; only the index ``rows`` is computed, nothing is copied."""
        return self._of_rows(new_order if self.rows is None else self.rows.index_select(0, new_order))

    def select(self, sentences: Tensor) -> Source:
        """Return a copy of the given sentences, with one row per sentence."""
        return Source(*(self[part].index_select(0, sentences) for part in range(3)))

    def expand(self) -> Source:
        """Return a copy with one entry per row, or this source itself if each sentence has one row."""
        return self if self.rows is None else self.select(self.rows)

    def group(self) -> tuple[Source, int]:
        """Return a source with one entry per sentence, and k, the number of rows per sentence.

        Beam search keeps the k rows of a sentence adjacent.  On a CPU, if rows are in another order, each row gets its
        own copy of its sentence, and k is 1.  On a GPU, rows in another order raise an error on the device, because
        checking the order on the host would need a synchronisation.
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
        torch._assert_async(
            together, "on a GPU each sentence needs k adjacent decoder rows, in the order of the sentences"
        )
        return self._of_rows(None), beam

    def _of_rows(self, rows: Tensor | None) -> Source:
        other = copy(self)
        other.rows = rows
        return other


def padding_bias(padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias that excludes padding from attention, minus infinity at padding and zero elsewhere: (B, 1, S)."""
    zeros = torch.zeros(padding_mask.shape, dtype=dtype, device=padding_mask.device)
    return zeros.masked_fill_(padding_mask, float("-inf")).unsqueeze(1)


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax along the last dimension, computed in at least float32: half precision loses small weights.

    The scores themselves are rounded to the model's precision.  This rounding makes the error of attention's output 1.4
    to 1.5 times as large as with unrounded scores: with float16, 0.06 to 0.12 % instead of 0.04 to 0.08 %.  The
    additional error is too small to justify float32 keys.
    """
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).type_as(scores)
