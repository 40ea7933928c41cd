"""Decoding ConvS2S one token at a time.

R rows (hypotheses), k of them for each of B sentences; S source positions, C layer width, f embedding width, w kernel
width.

A step copies nothing of the source and never waits for the device: each convolution is one matrix
product over the window of its last w inputs, each attention two products per sentence with the beams as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.nn.decoder_state import RowOrder, Window
from fairseq_plugins.nn.gated_convolution import SQRT_HALF, Shortcut
from fairseq_plugins.nn.multi_step_attention import MultiStepAttention, ProjectedAttention
from fairseq_plugins.nn.source import Source
from fairseq_plugins.nn.step_linear import step_linear
from fairseq_plugins.nn.weight_norm import has_weight_norm, without_weight_norm

if TYPE_CHECKING:
    from fairseq_plugins.models.convs2s.decoder import ConvS2SDecoder

__all__ = ["StepwiseDecoding"]


class StepwiseDecoding:
    """The decoding of one batch: its state between steps, and the step itself.

    It lives as long as the batch, so nothing here outlasts a change of the model's weights.

    Args:
        decoder: the decoder, prepared for inference or in the middle of training.
        encoder_out: the encoder's result.
        rows: R.
    """

    @torch.no_grad()
    def __init__(self, decoder: ConvS2SDecoder, encoder_out: Source, rows: int) -> None:
        if has_weight_norm(decoder):
            decoder = without_weight_norm(decoder, decoder.dictionary)
        self.decoder = decoder
        self.source, self.beam = encoder_out.group()
        sentences, source_length, _ = self.source.keys.shape
        if sentences * self.beam != rows:
            raise ValueError(f"{rows} target rows for an encoder's output of {sentences} x {self.beam} rows")
        self.order = RowOrder(rows, self.beam)
        self.steps = 0

        self.layers = []
        for convolution, attention, shortcut in decoder.layers:
            width, dim, _ = convolution.weight.shape
            projected = None
            if attention is not None and attention.projecting_pays(source_length, self.beam):
                projected = ProjectedAttention(attention, self.source)
            self.layers.append(
                _Layer(
                    window=Window(rows, width, dim, like=convolution.weight),
                    convolution=step_linear(convolution.matrix, convolution.bias, rows),
                    attention=attention,
                    projected=projected,
                    shortcut=shortcut,
                )
            )
        self.attending = sum(layer.attention is not None for layer in self.layers)
        self.output_layer = step_linear(decoder.output_projection.weight, decoder.output_projection.bias, rows)

    def reorder(self, new_order: Tensor) -> None:
        """Row i continues row ``new_order[i]`` from the next step on."""
        self.order.reorder(new_order)

    @torch.no_grad()
    def decode(self, prev_output_tokens: Tensor) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Decode the tokens that have not been seen yet.

        Args:
            prev_output_tokens: (R, T), all tokens so far.

        Returns:
            logits (R, n, V) for the n new tokens and, as ``"attn"``, their attention (R, n, S).

        Raises:
            ValueError: there is no new token, or a token lies beyond the model's positions.
        """
        length = prev_output_tokens.size(1)
        if length <= self.steps:
            raise ValueError(
                f"{self.steps} tokens of each row have been decoded and {length} are given; pass all tokens so far"
            )
        steps = [self.step(prev_output_tokens[:, step]) for step in range(self.steps, length)]
        features, attention = zip(*steps, strict=True)
        logits = self.output_layer(torch.stack(features, dim=1))
        return logits, {"attn": [torch.stack(attention, dim=1) if self.decoder.wants_attention else None]}

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row, (R,), to features (R, out_embed_dim) and the averaged attention (R, S)."""
        order, sentences = self.order.take()
        if sentences is not None:
            self._keep(sentences)
        decoder, source = self.decoder, self.source

        g = decoder.embedding.step(tokens, self.steps)
        h = decoder.from_embedding(g)
        g = self._by_sentence(g)
        gz = torch.baddbmm(source.bias, g, source.keys.transpose(1, 2), alpha=SQRT_HALF)  # (B, k, S)
        outputs = [h]
        total = torch.zeros_like(gz)
        for layer in self.layers:
            window = layer.window.push(decoder.dropout(h), order)
            h = F.glu(layer.convolution(window.flatten(1)), dim=-1)
            if layer.attention is not None:
                h = self._by_sentence(h)
                h, a = layer.projected(h, gz) if layer.projected is not None else layer.attention(h, g, source)
                h = h.flatten(0, 1)
                total += a
            h = layer.shortcut(h, outputs)
            outputs.append(h)
        self.steps += 1
        return decoder.dropout(decoder.to_embedding(h)), total.flatten(0, 1) / self.attending

    def _by_sentence(self, x: Tensor) -> Tensor:
        """(R, ...) -> (B, k, ...), without a copy."""
        return x.view(-1, self.beam, x.size(-1))

    def _keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        self.source = self.source.select(sentences)
        for layer in self.layers:
            if layer.projected is not None:
                layer.projected.select(sentences)


@dataclass
class _Layer:
    """One layer at decoding time: its state, its weights as steps want them, and the modules that do the rest."""

    window: Window
    convolution: Callable[[Tensor], Tensor]
    attention: MultiStepAttention | None
    projected: ProjectedAttention | None
    shortcut: Shortcut
