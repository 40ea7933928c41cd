"""A linear map that is applied at every decoding step, its weight laid out once for the processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.nn.packed_linear import PackedLinear, can_pack
from fairseq_plugins.nn.packing import current_packing

__all__ = ["step_linear"]


def step_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The map ``x -> x Wᵀ + b``, for many calls without gradients, with the weight as it is now.

    Args:
        weight: (N, K), best contiguous.
        bias: (N,), or None.
        rows: rows of x, at the start; later calls may have fewer.
    """
    if (packing := current_packing(weight)) is not None:
        packed = packing.packed(PackedLinear, weight, bias)
    # One row is a matrix-vector product, which reads the weight as it lies; packing costs as much as about three steps.
    elif rows > 1 and can_pack(weight):
        packed = PackedLinear(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # Not the object itself, for each of which torch 2.6 would compile a step anew.
    return partial(PackedLinear.__call__, packed)
