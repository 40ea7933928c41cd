"""Decoding step by step on a processor: weights laid out for its products, convolutions in pairs, values in bags."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_plugins.backends.cpu.bags import SightByBags, bags
from fairseq_plugins.backends.cpu.convolution import step_in_pairs
from fairseq_plugins.backends.cpu.linear import linear
from fairseq_plugins.backends.cpu.packing import map_of
from fairseq_plugins.models.conv_encoder.stepwise import ConvEncoderDecoding
from fairseq_plugins.models.convs2s.stepwise import ConvS2SDecoding, StepConvolution
from fairseq_plugins.models.incremental import StepwiseDecoding
from fairseq_plugins.models.weighted_transformer.stepwise import WeightedTransformerDecoding
from fairseq_plugins.nn.attention import Sight
from fairseq_plugins.nn.gated_convolution import GatedConvolution

__all__ = ["FEWEST_IN_BAGS", "FastConvEncoderDecoding", "FastConvS2SDecoding", "FastWeightedTransformerDecoding"]

FEWEST_IN_BAGS = 16  # rows; for fewer, matrix products take less time (measured, 2 cores of an EPYC of family 25)


class _WithPackedWeights(StepwiseDecoding):
    linear = staticmethod(linear)

    def map_of(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return map_of(weight, bias, self.order.rows)


class FastConvEncoderDecoding(_WithPackedWeights, ConvEncoderDecoding):
    """Of the convolutional encoder's LSTMs."""


class FastConvS2SDecoding(_WithPackedWeights, ConvS2SDecoding):
    """Of ConvS2S."""

    def step_convolution(self, module: GatedConvolution) -> StepConvolution:
        """In pairs of steps where that pays; a step that is compiled is one program, and has one form."""
        in_pairs = None if self.fixed else step_in_pairs(module, self.order.rows)
        return in_pairs or super().step_convolution(module)


class FastWeightedTransformerDecoding(_WithPackedWeights, WeightedTransformerDecoding):
    """Of the Weighted Transformer."""

    def sights(self, beam: int) -> tuple[Sight, Sight]:
        """By bags where there are rows enough; of the steps so far, t values for a row in the place of t·k."""
        sentences, length, k = len(self.source.keys), self.source.keys.size(1), self.order.beam
        if self.fixed or self.position.device.type != "cpu" or sentences * beam < FEWEST_IN_BAGS:
            return super().sights(beam)
        ancestors = self.ancestry.ancestors(self.steps)
        past = bags(ancestors, self.heads, self.capacity * k)
        source = bags(torch.arange(length).expand(sentences, beam, length), self.heads, length)
        return (
            SightByBags(self.steps * k, None, *past, ancestors.unsqueeze(1)),
            SightByBags(length, self.source.bias.unsqueeze(1), *source),
        )
