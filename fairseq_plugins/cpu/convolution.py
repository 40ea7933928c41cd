"""Convolutions, computed as linear maps of windows where this is faster on the CPU.

T time steps, B sentences, C input width, O output width, w kernel width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.cpu import winograd
from fairseq_plugins.cpu.linear import linear, uses_onednn
from fairseq_plugins.cpu.packing import BatchWeights


def convolve_time_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], packing: BatchWeights | None = None
) -> Tensor:
    """Return the convolution ``W * x + b``; see `torch.conv_tbc`.

    Args:
        x: (T, B, C).
        weight: (w, C, O).
        bias: (O,).
        padding: numbers of zeros before and after x; their sum is w - 1.
        packing: packed weights of the batch; None in training.

    Returns:
        (T, B, O).
    """
    length, kernel = x.size(0), len(weight)
    if packing is not None and winograd.is_faster(x, kernel, x.size(2), packing):
        return winograd.convolve(x, weight, bias, padding, packing)
    x = F.pad(x, (0, 0, 0, 0, *padding))
    if not uses_onednn(x, packing):
        return torch.conv_tbc(x.contiguous(), weight, bias)
    windows = torch.cat([x[start : start + length] for start in range(kernel)], dim=-1)
    return linear(windows, as_matrix(weight), bias, packing)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a view of the weight as the matrix that maps a flattened window to outputs: (w, C, O) -> (O, wC)."""
    return weight.flatten(0, 1).t()


def with_window_layout(weight: Tensor) -> Tensor:
    """Return the weight, (w, C, O), in the memory layout for which `as_matrix` returns a contiguous matrix.

    Shape and values are unchanged.  The layout is part of the parameter's strides, so loading a checkpoint or updating
    the parameter preserves it.
    """
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def convolve_channels_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], packing: BatchWeights | None = None
) -> Tensor:
    """Return the convolution ``W * x + b``; see `torch.nn.functional.conv1d`.

    On a CPU, without gradients, this is computed as a linear map of windows.

    Args:
        x: (B, C, T).
        weight: (O, C, w).
        bias: (O,).
        padding: numbers of zeros before and after x; their sum is w - 1.
        packing: packed weights of the batch; None in training.

    Returns:
        (B, O, T).
    """
    x = F.pad(x, padding)
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return F.conv1d(x, weight, bias)
    windows = x.unfold(2, weight.size(2), 1).transpose(1, 2)
    return linear(windows.flatten(2), weight.flatten(1), bias, packing).transpose(1, 2)
