"""Decoding ConvS2S one token at a time.

R rows (hypotheses), k of them for each of B sentences; S source positions, C layer width, f embedding width, w kernel
width.

A step copies nothing of the source and never waits for the device: each convolution is a matrix product over the window
of its last w inputs, or less, each attention two products per sentence with the beams as rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.models.incremental import StepwiseDecoding
from fairseq_plugins.nn.decoder_state import Kept, Window
from fairseq_plugins.nn.gated_convolution import SQRT_HALF, GatedConvolution, Shortcut, StepConvolution
from fairseq_plugins.nn.multi_step_attention import MultiStepAttention, ProjectedAttention
from fairseq_plugins.nn.source import Source
from fairseq_plugins.nn.weight_norm import has_weight_norm, without_weight_norm

if TYPE_CHECKING:
    from fairseq_plugins.models.convs2s.decoder import ConvS2SDecoder

__all__ = ["ConvS2SDecoding"]


class ConvS2SDecoding(StepwiseDecoding):
    """The decoding of one batch.

    Args: as of `StepwiseDecoding`.
    """

    @torch.no_grad()
    def __init__(
        self, decoder: ConvS2SDecoder, source: Source, beam: int, room: int | None, words: Tensor | None
    ) -> None:
        if has_weight_norm(decoder):
            decoder = without_weight_norm(decoder, decoder.dictionary)
        super().__init__(decoder, source, beam, room, words)
        self.from_embedding, self.to_embedding = (
            self.linear(part.weight, part.bias) for part in (decoder.from_embedding, decoder.to_embedding)
        )

        self.layers = []
        for convolution, attention, shortcut in decoder.layers:
            projected = None
            if attention is not None and attention.projecting_pays(source.keys.size(1)):
                projected = ProjectedAttention(attention, source, self.multiply)
            self.layers.append(
                _Layer(
                    convolution=self.convolution(convolution),
                    attention=attention,
                    projected=projected,
                    shortcut=shortcut,
                )
            )
        self.attending = sum(layer.attention is not None for layer in self.layers)

    def convolution(self, module: GatedConvolution) -> StepConvolution:
        """One with plain weights, step by step, as they are now."""
        kernel, dim, _ = module.weight.shape
        window = Window(self.order.rows, kernel, dim, like=module.weight, fixed=self.fixed)
        return StepConvolution(self.linear(module.matrix, module.bias), window)

    def step(self, tokens: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One token per row, (R,), to features (R, out_embed_dim) and the averaged attention (R, S)."""
        decoder, source = self.decoder, self.source

        g = decoder.embedding.step(tokens, self.position)
        h = self.from_embedding(g)
        g = self.by_sentence(g)
        gz = torch.baddbmm(source.bias, g, source.keys.transpose(1, 2), alpha=SQRT_HALF)  # (B, k, S)
        outputs = [h]
        total = torch.zeros_like(gz) if decoder.wants_attention else None
        for layer in self.layers:
            h = F.glu(layer.convolution.step(decoder.dropout(h), order), dim=-1)
            if layer.attention is not None:
                h = self.by_sentence(h)
                h, a = layer.projected.attend(h, gz) if layer.projected is not None else layer.attention(h, g, source)
                h = h.flatten(0, 1)
                if total is not None:
                    total += a
            h = layer.shortcut(h, outputs)
            outputs.append(h)
        average = None if total is None else total.flatten(0, 1) / self.attending
        return decoder.dropout(self.to_embedding(h)), average

    def keep(self, kept: Kept) -> None:
        """Go on with these sentences only."""
        super().keep(kept)
        for layer in self.layers:
            if layer.projected is not None:
                layer.projected.keep(kept)


@dataclass
class _Layer:
    """One layer at decoding time: its state, its weights as steps want them, and the modules that do the rest."""

    convolution: StepConvolution
    attention: MultiStepAttention | None
    projected: ProjectedAttention | None
    shortcut: Shortcut
