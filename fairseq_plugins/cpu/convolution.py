"""Convolutions as linear maps of windows, where a CPU multiplies these faster.

T time steps, B sentences, C input width, O output width, w kernel width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.cpu import winograd
from fairseq_plugins.cpu.linear import linear, uses_onednn
from fairseq_plugins.cpu.packing import BatchPacking


def convolve_time_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], packing: BatchPacking | None = None
) -> Tensor:
    """Return ``W * x + b``, as `torch.conv_tbc`.

    Args:
        x: (T, B, C).
        weight: (w, C, O).
        bias: (O,).
        padding: zeros before and after x.
        packing: as in `linear`.

    Returns:
        (T, B, O), for a padding of w - 1 zeros together.
    """
    length, kernel = x.size(0), len(weight)
    if packing is not None and winograd.pays(x, kernel, x.size(2), packing):
        return winograd.convolve(x, weight, bias, padding, packing)
    x = F.pad(x, (0, 0, 0, 0, *padding))
    if not uses_onednn(x, packing):
        return torch.conv_tbc(x.contiguous(), weight, bias)
    windows = torch.cat([x[start : start + length] for start in range(kernel)], dim=-1)
    return linear(windows, as_matrix(weight), bias, packing)


def as_matrix(weight: Tensor) -> Tensor:
    """Return the convolution at one position as a linear map of its window: (w, C, O) -> (O, wC), a view."""
    return weight.flatten(0, 1).t()


def lay_out(weight: Tensor) -> Tensor:
    """Return a weight, (w, C, O), in a memory layout in which its `as_matrix` is contiguous; shape and values stay.

    The layout is in the strides of the parameter itself, so it cannot go stale, and loading a checkpoint keeps it.
    """
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def convolve_channels_first(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], packing: BatchPacking | None = None
) -> Tensor:
    """Return ``W * x + b``, as `torch.nn.functional.conv1d`; on a CPU without gradients as a product of windows.

    Args:
        x: (B, C, T).
        weight: (O, C, w).
        bias: (O,).
        padding: zeros before and after x.
        packing: as in `linear`.

    Returns:
        (B, O, T), for a padding of w - 1 zeros together.
    """
    x = F.pad(x, padding)
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return F.conv1d(x, weight, bias)
    windows = x.unfold(2, weight.size(2), 1).transpose(1, 2)
    return linear(windows.flatten(2), weight.flatten(1), bias, packing).transpose(1, 2)
