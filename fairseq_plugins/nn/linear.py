"""Linear maps through whichever of torch's two matrix libraries is faster on this processor.

On the CPU torch multiplies float32 matrices with MKL, which on AMD's processors with AVX-512 reaches half the speed of
oneDNN, which torch ships too.  N rows, K inputs, O outputs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.nn.packing import can_pack, current_packing

__all__ = ["FastLinear", "linear", "prefers_onednn"]

# Below this many multiplications a product takes microseconds, and oneDNN's preparations the most of them.
_SMALL = 2**20


class FastLinear(nn.Linear):
    """torch's, computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., O)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``, as `torch.nn.functional.linear`.

    Args:
        x: (..., K).
        weight: (O, K).
        bias: (O,), or None.

    Returns:
        (..., O).
    """
    if x.numel() * weight.size(0) < _SMALL or weight.dtype != x.dtype or not prefers_onednn(x):
        return F.linear(x, weight, bias)
    if (packing := current_packing(weight)) is not None:
        return packing.product(weight, bias)(x)
    y: Tensor = _OneDNNLinear.apply(x.flatten(0, -2), weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)  # a view could not be overwritten without copies


def prefers_onednn(x: Tensor) -> bool:
    """Whether `linear` is faster than torch's own products with x, unless they are very small."""
    return can_pack(x) and (current_packing(x) is not None or _onednn_is_faster())


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t()) if for_x else None,
            _onednn(grad.t(), x.t()) if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether MKL leaves half of this processor idle: it uses AVX-512 on Intel's processors alone.

    The two round in other ways.  So this is a rule and no measurement, which other work on the machine could turn: a
    training that is resumed is to compute, to the last bit, as the process before it.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.backends.mkl.is_available() and has_avx512 and "AuthenticAMD" in _processor()


def _processor() -> str:
    """What Linux knows of the processor; nothing elsewhere."""
    description = Path("/proc/cpuinfo")
    return description.read_text(encoding="utf-8") if description.exists() else ""
