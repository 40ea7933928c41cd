"""A linear map that is applied at every decoding step, its weight laid out once for the processor.

On the CPU a matrix product of a few rows spends much of its time bringing the weight into the order in which the kernel
reads it.  oneDNN, which torch ships, can keep a weight in that order: with a 1536 x 1024 matrix on two AVX-512 cores a
product of 80 rows then takes 0.7 of the time, one of 5 rows 0.45, and laying it out costs as much as about three steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.nn.linear import has_onednn

__all__ = ["step_linear"]


def step_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The map ``x -> x Wᵀ + b``, for many calls without gradients, with the weight as it is now.

    Args:
        weight: (N, K), best contiguous.
        bias: (N,), or None.
        rows: rows of x, at the start; later calls may have fewer.
    """
    # One row is a matrix-vector product, which reads the weight as it lies; an exported program packs for itself.
    packs = weight.device.type == "cpu" and weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if rows > 1 and packs and has_onednn() and not torch.compiler.is_compiling():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)
