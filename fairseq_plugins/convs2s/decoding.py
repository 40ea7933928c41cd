"""Incremental decoding of ConvS2S.

B sentences, k rows (hypotheses) per sentence, R = B·k rows, S source positions, C and D input and output width of a
layer, f embedding width, w kernel width.

A step does not copy the source, and does not synchronise with the device.  A convolution is the product of its weight
and the last w inputs of each row.  Attention consists of two matrix products per sentence, whose rows are the
hypotheses.
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
    """The decode-time state of ConvS2S for one batch."""

    decoder: ConvS2SDecoder

    def set_up(self) -> None:
        """Prepare the weights, set the windows to zero, and project the source for each attention."""
        decoder = self.decoder
        self.from_embedding, self.to_embedding = (
            self.prepare(part.weight, part.bias) for part in (decoder.from_embedding, decoder.to_embedding)
        )
        self.layers: list[tuple[StepConvolution | PairedConvolution, ProjectedAttention | None, Shortcut]] = []
        for convolution, attention, shortcut in decoder.layers:
            projected = None if attention is None else ProjectedAttention(attention, self.source, self.packing)
            if not self.fixed:  # compiled steps do not use packed weights
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
        """Return features, (R, out_embed_dim), and the average attention, (R, S) or None, for tokens, (R,)."""
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
        """Drop all sentences except ``kept``; the windows drop rows with the order of the next step."""
        super().keep(kept)
        for _, attention, _ in self.layers:
            if attention is not None:
                attention.keep(kept)


class StepConvolution:
    """A causal `GatedConvolution` that reads one input per row in each step.

    It has a method `step` instead of `__call__`, because torch 2.6 would recompile a step for each callable object.

    Args:
        product: linear map with the convolution's `matrix` and bias, (R, wC) -> (R, 2D).
        past: zeros in the shape of the last w - 1 inputs of each row, (R, (w - 1)·C).
        fixed: whether the state keeps its memory; see `Decoding.fixed`.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], past: Tensor, fixed: bool = False) -> None:
        self.product, self.past, self.fixed = product, past, fixed

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return the next output of each row, (R, D).

        Args:
            x: next input of each row, (R, C).
            order: index of the previous row that each row continues, (R,); None if no row moved.
        """
        past = self.past if order is None else reorder_rows(self.past, order)
        window = torch.cat([past, x], dim=1)
        update_state(self, past=window[:, x.size(1) :])
        return F.glu(self.product(window), dim=-1)


class PairedConvolution:
    """A convolution like `StepConvolution` with kernel 3, which needs four products instead of six for two steps.

    The module `winograd` defines the products m_0 to m_3 and the two outputs.  Only m_3 needs the input of the second
    step.  The first step computes m_0, m_1 and m_2, and stores m_1 - m_2.  The second step adds m_3.

    Args:
        products: result of `winograd.packed_products`.
        zeros: initial inputs, zero, (R, C).
    """

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], zeros: Tensor) -> None:
        self.products = products
        self.inputs = zeros, zeros  # the last two inputs of each row
        self.rest: Tensor | None = None  # m_1 - m_2, between the two steps of a pair

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return the next output of each row, like `StepConvolution.step`.

        The caller must not modify x, because two more steps read it.
        """
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
