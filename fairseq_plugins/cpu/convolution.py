"""Convolutions, computed by the fastest of three methods.

The three methods are torch's convolution, a linear map of windows, and Winograd's method, which computes neighbouring
outputs in pairs.

Two neighbouring outputs of a convolution of width three, y_0 = x_0 w_0 + x_1 w_1 + x_2 w_2 and
y_1 = x_1 w_0 + x_2 w_1 + x_3 w_2, need six products of an input and a weight.  Sums of inputs and sums of weights
reduce the six products to four (Winograd 1980; F(2, 3) of Lavin & Gray 2016):

    m_0 = (x_0 - x_2) w_0                      y_0 = m_0 + m_1 + m_2
    m_1 = (x_1 + x_2) (w_0 + w_1 + w_2) / 2    y_1 = m_1 - m_2 + m_3
    m_2 = (x_2 - x_1) (w_0 - w_1 + w_2) / 2
    m_3 = (x_3 - x_1) w_2

If both outputs of a pair have similar magnitudes, rounding errors are two to four times as large as with six products.
If one output of a pair is much larger than the other, the rounding errors of both outputs are proportional to the
larger output, and the smaller output is less accurate.

T time steps, B sentences, C input width, O output width, w kernel width.  A pair of numbers ``padding`` says how many
zeros precede and follow the input; their sum is w - 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.cpu.linear import linear, uses_onednn
from fairseq_plugins.cpu.packing import BatchWeights, PackedLinear, can_pack

# Minimum input width for computing outputs in pairs.  A pair needs fewer products and more sums than two separate
# outputs.  If a layer's inputs are narrower, pairs save no time: the additional sums take as long as the products that
# are saved.
NARROWEST = 512


def convolve_time_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], batch_weights: BatchWeights | None = None
) -> Tensor:
    """Return ``W * x + b``, see `torch.conv_tbc`: x (T, B, C), weight (w, C, O), bias (O,) -> (T, B, O)."""
    length, kernel = x.size(0), len(weight)
    if batch_weights is not None and pairs_are_faster(x, kernel, x.size(2), batch_weights):
        return convolve_in_pairs(x, weight, bias, padding, batch_weights)
    x = F.pad(x, (0, 0, 0, 0, *padding))
    if not uses_onednn(x, batch_weights, with_copy=True):
        return torch.conv_tbc(x.contiguous(), weight, bias)
    windows = torch.cat([x[start : start + length] for start in range(kernel)], dim=-1)
    return linear(windows, as_matrix(weight), bias, batch_weights)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a view of the weight as the matrix that maps a flattened window to outputs, (w, C, O) -> (O, wC)."""
    return weight.flatten(0, 1).t()


def with_window_layout(weight: Tensor) -> Tensor:
    """Return the weight, (w, C, O), in the memory layout for which `as_matrix` returns a contiguous matrix.

    Shape and values are unchanged.  The layout is stored in the parameter's strides, so loading a checkpoint or
    updating the parameter preserves it.
    """
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def convolve_channels_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], batch_weights: BatchWeights | None = None
) -> Tensor:
    """Return ``W * x + b``, see `F.conv1d`: x (B, C, T), weight (O, C, w), bias (O,) -> (B, O, T)."""
    x = F.pad(x, padding)
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return F.conv1d(x, weight, bias)
    windows = x.unfold(2, weight.size(2), 1).transpose(1, 2)
    return linear(windows.flatten(2), weight.flatten(1), bias, batch_weights).transpose(1, 2)


def pairs_are_faster(like: Tensor, kernel: int, dim: int, batch_weights: BatchWeights | None) -> bool:
    """Return whether `convolve_in_pairs` is faster than one linear map of windows.

    The inputs have the width ``dim``, and the device and dtype of ``like``.

    `convolve_in_pairs` is not faster in precisions below float32.  The choice between the two methods does not depend
    on the batch size: each method packs its own matrices, and batches of different sizes are to use the same matrices.
    """
    return (
        kernel == 3
        and dim >= NARROWEST
        and batch_weights is not None
        and batch_weights.precision == "float32"
        and can_pack(like)
    )


def convolve_in_pairs(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], batch_weights: BatchWeights
) -> Tensor:
    """Compute `convolve_time_first` for kernel width three, with four products for each pair of outputs."""
    (before, after), length = padding, x.size(0)
    x = F.pad(x, (0, 0, 0, 0, before, after + length % 2))
    x0, x1, x2, x3 = x[0:-2:2], x[1:-2:2], x[2::2], x[3::2]
    multiply0, multiply1, multiply2, multiply3 = batch_weights.packed(packed_products, as_matrix(weight), bias)
    m0, m1, m2, m3 = multiply0(x0 - x2), multiply1(x1 + x2), multiply2(x2 - x1), multiply3(x3 - x1)
    y = m0.new_empty(2 * len(m0), *m0.shape[1:])
    torch.add(m0.add_(m1), m2, out=y[0::2])
    torch.add(m1.sub_(m2), m3, out=y[1::2])
    return y[:length]


def packed_products(matrix: Tensor, bias: Tensor | None, precision: str) -> list[PackedLinear]:
    """Return the four linear maps from sums of inputs, (..., C), to m_0, ..., m_3, (..., O), for a matrix (O, 3C).

    m_1 includes the bias, so both outputs include it.
    """
    sums = sums_of_weights(matrix.unflatten(1, (3, -1)).transpose(0, 1))
    return [PackedLinear(*each, precision) for each in zip(sums, (None, bias, None, None), strict=True)]


def sums_of_weights(weight: Tensor) -> Tensor:
    """Return the four sums of weights, (3, C, O) -> (4, C, O)."""
    w0, w1, w2 = weight
    half = (w0 + w2) * 0.5
    return torch.stack([w0, half.add(w1, alpha=0.5), half.sub(w1, alpha=0.5), w2])
