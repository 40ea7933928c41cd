"""Incremental decoding of ConvS2S.

B sentences, k rows (hypotheses) per sentence, R = B·k rows, S source positions, C and D input and output width of a
layer, f embedding width, w kernel width.

A step copies no part of the source and never synchronises with the device.  Each convolution is a matrix product over
the window of its last w inputs.  Each attention is two products per sentence, with the hypotheses as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.common.decoding import KeptSentences, StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.convs2s.layers import SQRT_HALF, GatedConvolution, ProjectedAttention, Shortcut
from fairseq_plugins.cpu import winograd
from fairseq_plugins.cpu.packing import with_packing

if TYPE_CHECKING:
    from fairseq_plugins.convs2s.model import ConvS2SDecoder


class ConvS2SDecoding(StepwiseDecoding):
    """The decoding of one batch."""

    decoder: ConvS2SDecoder

    def set_up(self) -> None:
        """Prepare weights, empty windows, and attention with projected sources."""
        decoder = self.decoder
        self.from_embedding, self.to_embedding = (
            self.prepare(part.weight, part.bias) for part in (decoder.from_embedding, decoder.to_embedding)
        )
        self.layers: list[tuple[StepConvolution | PairedConvolution, ProjectedAttention | None, Shortcut]] = []
        for convolution, attention, shortcut in decoder.layers:
            projected = None if attention is None else ProjectedAttention(attention, self.source, self.packing)
            if not self.fixed:  # a compiled step uses the plain weight
                shortcut = with_packing(shortcut, self.packing)
            self.layers.append((self._step_by_step(convolution), projected, shortcut))
        self.attending = sum(attention is not None for _, attention, _ in self.layers)

    def _step_by_step(self, module: GatedConvolution) -> StepConvolution | PairedConvolution:
        (kernel, dim, _), matrix, packing, rows = module.weight.shape, module.matrix, self.packing, self.order.rows
        if packing is not None and not self.fixed and winograd.is_faster(matrix, kernel, dim, packing):
            products = packing.packed(winograd.packed_products, matrix, module.bias)
            return PairedConvolution(products, matrix.new_zeros(rows, dim))
        past = matrix.new_zeros(rows, (kernel - 1) * dim)
        return StepConvolution(self.prepare(matrix, module.bias), past, self.fixed)

    def compute(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map one token per row, (R,), to features (R, out_embed_dim) and the averaged attention (R, S)."""
        decoder, source = self.decoder, self.source

        g = decoder.embedding.step(tokens, self.position)
        h = self.from_embedding(g)
        gz = torch.baddbmm(source.bias, self.by_sentence(g), source.keys.transpose(1, 2), alpha=SQRT_HALF)  # (B, k, S)
        outputs = [h]
        total = torch.zeros_like(gz) if decoder.wants_attention else None
        for convolution, attention, shortcut in self.layers:
            h = convolution.step(decoder.dropout(h), order)
            if attention is not None:
                h, a = attention.attend(self.by_sentence(h), gz)
                h = h.flatten(0, 1)
                if total is not None:
                    total += a
            h = shortcut(h, outputs)
            outputs.append(h)
        average = None if total is None else total.flatten(0, 1) / self.attending
        return decoder.dropout(self.to_embedding(h)), average

    def keep(self, kept: KeptSentences) -> None:
        """Keep only these sentences; the next order drops the other rows from the windows."""
        super().keep(kept)
        for _, attention, _ in self.layers:
            if attention is not None:
                attention.keep(kept)


class StepConvolution:
    """A causal `GatedConvolution` with D outputs that reads one input per row and step.

    It is not callable, because torch 2.6 would recompile a step for each callable object.

    Args:
        product: linear map of `GatedConvolution.matrix` and bias, (R, wC) -> (R, 2D).
        past: last inputs of each row, initially zeros, (R, (w - 1)·C).
        fixed: whether the state stays in place in memory; then no row may be dropped.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], past: Tensor, fixed: bool = False) -> None:
        self.product, self.past, self.fixed = product, past, fixed

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return one output of each row, (R, D).

        Args:
            x: next inputs, (R, C).
            order: previous row that each row continues, (R,); None if no row moved.
        """
        past = self.past if order is None else reorder_rows(self.past, order)
        window = torch.cat([past, x], dim=1)
        update_state(self, past=window[:, x.size(1) :])
        return F.glu(self.product(window), dim=-1)


class PairedConvolution:
    """A `StepConvolution` with kernel 3 that computes two steps in four products instead of six; see `winograd`.

    Only m_3 needs the last input of a pair.  The first step computes m_0, m_1 and m_2, and stores m_1 - m_2 for the
    second step, which adds m_3.

    Args:
        products: maps of `winograd.packed_products`.
        zeros: (R, C).
    """

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], zeros: Tensor) -> None:
        self.products = products
        self.inputs = zeros, zeros  # last two inputs
        self.rest: Tensor | None = None  # m_1 - m_2, between the two steps of a pair

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return one output of each row, like `StepConvolution.step`; x must stay unchanged for two more steps."""
        multiply0, multiply1, multiply2, multiply3 = self.products
        (first, second), rest = self.inputs, self.rest
        if order is not None:
            first, second = first.index_select(0, order), second.index_select(0, order)
        self.inputs = second, x
        if rest is None:
            m1, m2 = multiply1(second + x), multiply2(x - second)
            self.rest = m1 - m2
            return F.glu(multiply0(first - x).add_(m1).add_(m2), dim=-1)
        if order is not None:
            rest = rest.index_select(0, order)
        self.rest = None
        return F.glu(multiply3(x - first).add_(rest), dim=-1)
