"""Layers of ConvS2S: gated convolutions, shortcuts (sections 3.2 and 3.4), multi-step attention (section 3.3).

The second part of the file contains the forms of these layers for incremental decoding.  A decoding step does not copy
the source, and does not synchronise with the device.  In a decoding step, a convolution is the product of its weight
and the last w inputs of each row.  Attention in a decoding step consists of two matrix products per sentence, with one
matrix row per hypothesis.

B sentences, T time steps or target positions, S source positions, C input width, D output width, w kernel width,
f embedding width, k hypotheses (rows) per sentence, R = B·k.  Time is the first dimension in convolutions, as in
`torch.conv_tbc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.common.decoding import StepwiseDecoding, reorder_rows, update_state
from fairseq_plugins.common.source import Source, softmax
from fairseq_plugins.common.weight_norm import WeightNormalisable, normalised_linear
from fairseq_plugins.cpu.convolution import (
    as_matrix,
    convolve_time_first,
    packed_products,
    pairs_are_faster,
    with_window_layout,
)
from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import BatchWeights, with_batch_weights

if TYPE_CHECKING:
    from fairseq_plugins.convs2s.model import ConvS2SDecoder


SQRT_HALF = math.sqrt(0.5)


class GatedConvolution(WeightNormalisable):
    """A gated convolution: ``v([A B]) = A ⊗ σ(B)`` with ``[A B] = W * x + b``.

    If the convolution is causal, an output depends on its own position and the w - 1 previous positions.  Otherwise the
    window is centred; if w is even, the window has one more position on the right.

    A gated linear unit divides the variance of small inputs by four.  Dropout that retains inputs with probability p
    multiplies the variance by 1/p.  To keep the variance, initial weights for n inputs have the standard deviation
    √(4p/n) (section 3.5 and appendix A).
    """

    batch_weights: BatchWeights | None = None  # packed weights of the current batch, set by `with_batch_weights`

    def __init__(self, in_dim: int, out_dim: int, kernel: int, causal: bool, retain: float = 1.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.padding = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.register_parameter("weight", nn.Parameter(torch.empty(kernel, in_dim, 2 * out_dim)))
        self.bias = nn.Parameter(torch.zeros(2 * out_dim))
        nn.init.normal_(self.weight, mean=0, std=math.sqrt(4 * retain / (kernel * in_dim)))
        self.normalise_weight_(dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all positions, (T, B, C) -> (T, B, D)."""
        return F.glu(convolve_time_first(x, self.weight, self.bias, self.padding, self.batch_weights), dim=-1)

    def of_windows(self, windows: Tensor) -> Tensor:
        """Compute one output for each window, given as w concatenated inputs, (..., wC) -> (..., D)."""
        return F.glu(linear(windows, self.matrix, self.bias, self.batch_weights), dim=-1)

    @property
    def matrix(self) -> Tensor:
        """A view of the weight as the matrix that maps flattened windows to outputs, (2D, wC)."""
        return as_matrix(self.weight)

    def remove_weight_norm_(self) -> None:
        """Remove weight normalisation: store the weight itself, laid out in memory so that `matrix` is contiguous."""
        super().remove_weight_norm_()
        self.weight.data = with_window_layout(self.weight.data)


class Shortcut(nn.Module):
    """A residual connection that spans ``distance`` layers, with a linear map if the widths at its ends differ.

    A connection of distance 1 starts at the layer's own input.  Distance 0 means no connection.
    """

    def __init__(self, distance: int, from_dim: int, to_dim: int) -> None:
        super().__init__()
        self.distance = distance
        widens = distance > 0 and from_dim != to_dim
        self.projection = normalised_linear(from_dim, to_dim) if widens else None

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Add an earlier output to x; the factor √½ keeps the variance of the sum (section 3.4).

        ``outputs`` contains the input of the first layer, followed by the outputs of all previous layers.
        """
        if self.distance == 0:
            return x
        residual = outputs[-self.distance]
        if self.projection is not None:
            residual = self.projection(residual)
        return (x + residual) * SQRT_HALF


class MultiStepAttention(nn.Module):
    """The attention of a decoder layer of width C; embeddings and encoder output have width f."""

    def __init__(self, dim: int, embed_dim: int) -> None:
        super().__init__()
        self.in_projection = normalised_linear(dim, embed_dim)
        self.out_projection = normalised_linear(embed_dim, dim)

    def forward(self, h: Tensor, g: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        """Attend to the source (equations 1 and 2 of section 3.3), and add h; the factor √½ keeps the variance.

        Args:
            h: output of the layer's convolution, (B, T, C).
            g: embeddings of the previous target tokens, (B, T, f).
            source: encoder output, with z as keys and √½ (z + e) as values.

        Returns:
            ``√½ (h + W_o c + b_o)``, (B, T, C), and the attention a, (B, T, S).
        """
        d = (self.in_projection(h) + g) * SQRT_HALF
        a = softmax(torch.baddbmm(source.bias, d, source.keys.transpose(1, 2)))
        # The average of m values has 1/√m of their standard deviation; multiplying by √m restores it.
        c = torch.bmm(a, source.values) * source.sqrt_lengths
        return (h + self.out_projection(c)) * SQRT_HALF, a


class ProjectedAttention:
    """Multi-step attention that applies its two projections to the source once per sentence, instead of in each step.

    The scores are d·z = √½ (h·(W_dᵀ z) + b_d·z + g·z) for d = √½ (W_d h + b_d + g).  For m source tokens,
    the output is √m W_o Σ a_j v_j = Σ a_j (√m W_o v_j).  Therefore W_dᵀ z, b_d·z and √m W_o v_j are computed once per
    sentence.  The term g·z does not depend on the layer, so the caller computes g·z once for all layers.
    """

    per_sentence = "keys", "score_bias", "values"

    def __init__(self, attention: MultiStepAttention, source: Source, batch_weights: BatchWeights | None) -> None:
        w_d, b_d = attention.in_projection.weight, attention.in_projection.bias
        w_o, b_o = attention.out_projection.weight, attention.out_projection.bias
        # A step multiplies few queries by the keys; this is several times faster with keys (B, C, S) than (B, S, C).
        self.keys = linear(source.keys, w_d.t(), None, batch_weights).transpose(1, 2).contiguous()
        self.score_bias = (torch.matmul(source.keys, b_d) * SQRT_HALF).unsqueeze(1)  # (B, 1, S)
        # Attention weights sum to one, so adding b_o to each value is the same as adding it to the average.
        values = linear(source.values, w_o, None, batch_weights)
        self.values = torch.addcmul(b_o * SQRT_HALF, values, source.sqrt_lengths, value=SQRT_HALF)  # (B, S, C)

    def attend(self, h: Tensor, gz: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `MultiStepAttention.forward` for one step; the second dimension of h is hypotheses, not time.

        Args:
            h: output of the layer's convolution, (B, k, C).
            gz: √½ g·z, and minus infinity at padding, (B, k, S).
        """
        a = softmax(torch.baddbmm(gz + self.score_bias, h, self.keys, alpha=SQRT_HALF))
        return torch.baddbmm(h, a, self.values, beta=SQRT_HALF), a


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
            projected = None if attention is None else ProjectedAttention(attention, self.source, self.batch_weights)
            if not self.fixed:  # a `Linear` in a compiled step does not use packed weights
                shortcut = with_batch_weights(shortcut, self.batch_weights)
            self.layers.append((self._step_by_step(convolution), projected, shortcut))

    def projected(self) -> list[ProjectedAttention]:
        """Return the attention of each layer that has one, from the input up; see `StepwiseDecoding.projected`."""
        return [attention for _, attention, _ in self.layers if attention is not None]

    def _step_by_step(self, module: GatedConvolution) -> StepConvolution | PairedConvolution:
        (kernel, dim, _), matrix, rows = module.weight.shape, module.matrix, self.order.rows
        batch_weights = self.batch_weights
        if batch_weights is not None and not self.fixed and pairs_are_faster(matrix, kernel, dim, batch_weights):
            products = batch_weights.packed(packed_products, matrix, module.bias)
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
        average = None if total is None else total.flatten(0, 1) / len(self.projected())
        return decoder.dropout(self.to_embedding(h)), average


class StepConvolution:
    """A causal `GatedConvolution` that reads one input per row in each step.

    The method is named `step`, not `__call__`, because torch 2.6 would recompile a step for each callable object.

    Args:
        product: linear map with the convolution's `matrix` and bias, (R, wC) -> (R, 2D).
        past: zeros in the shape of the last w - 1 inputs of each row, (R, (w - 1)·C).
        fixed: whether the state keeps its shape and address; see `Decoding.fixed`.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], past: Tensor, fixed: bool = False) -> None:
        self.product, self.past, self.fixed = product, past, fixed

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return the next output of each row, (R, D), for its next input, (R, C); for the order see `Decoding.step`."""
        window = torch.cat([reorder_rows(self.past, order), x], dim=1)
        update_state(self, past=window[:, x.size(1) :])
        return F.glu(self.product(window), dim=-1)


class PairedConvolution:
    """A convolution with kernel 3 that needs four products for two steps; `StepConvolution` needs six products.

    The module `cpu.convolution` defines the products m_0 to m_3 and the two outputs.  Only m_3 needs the input of the
    second step.  The first step computes m_0, m_1 and m_2, and stores m_1 - m_2.  The second step adds m_3.

    Attributes:
        inputs: last two inputs of each row.
        rest: the difference m_1 - m_2 after the first step of a pair, None after the second step.
    """

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], zeros: Tensor) -> None:
        self.products = products
        self.inputs = zeros, zeros
        self.rest: Tensor | None = None

    def step(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return the next output of each row, like `StepConvolution.step`.

        The caller must not modify x, because the next two steps also read x.
        """
        multiply0, multiply1, multiply2, multiply3 = self.products
        first, second = (reorder_rows(each, order) for each in self.inputs)
        self.inputs = second, x
        if self.rest is None:
            m1, m2 = multiply1(second + x), multiply2(x - second)
            self.rest = m1 - m2
            return F.glu(multiply0(first - x).add_(m1).add_(m2), dim=-1)
        rest, self.rest = reorder_rows(self.rest, order), None
        return F.glu(multiply3(x - first).add_(rest), dim=-1)
