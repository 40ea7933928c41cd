"""Linear maps through whichever of torch's two matrix libraries is faster on this processor.

On the CPU torch multiplies float32 matrices with MKL, which on some processors (AMD's) reaches half the speed of
oneDNN, which torch ships too.  N rows, K inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.backends.cpu.packing import current_packing
from fairseq_plugins.backends.cpu.products import Packed, can_pack, onednn_product
from fairseq_plugins.nn.selected_rows import LINEAR_MAPS

__all__ = ["FastLinear", "linear", "onednn_is_faster", "prefers_onednn"]

# Below this many multiplications a product takes microseconds, and oneDNN's preparations the most of them.
_SMALL = 2**20


class FastLinear(nn.Linear):
    """torch's, computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., O)."""
        return linear(x, self.weight, self.bias)


LINEAR_MAPS.add(FastLinear.forward)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``, as `torch.nn.functional.linear`.

    Args:
        x: (..., K).
        weight: (O, K).
        bias: (O,), or None.

    Returns:
        (..., O).
    """
    if not prefers_onednn(x) or weight.dtype != x.dtype or x.numel() * weight.size(0) < _SMALL:
        return F.linear(x, weight, bias)
    if (packing := current_packing(weight)) is not None:
        return packing.packed(Packed, weight, bias)(x)
    y: Tensor = _OneDNNLinear.apply(x.reshape(-1, x.size(-1)), weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)  # a view could not be overwritten without copies


def prefers_onednn(x: Tensor) -> bool:
    """Whether `linear` is faster than torch's own products with x, unless they are very small."""
    return can_pack(x) and (current_packing(x) is not None or onednn_is_faster())


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            onednn_product(grad, weight.t()) if for_x else None,
            _product_laid_out_as(weight, grad, x) if for_weight else None,
            grad.sum(dim=0) if for_bias else None,
        )


def _product_laid_out_as(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """``gradᵀ x``, (O, K), in the weight's order in memory, into which its gradient would have to be copied."""
    return onednn_product(grad.t(), x.t()) if weight.is_contiguous() else onednn_product(x.t(), grad.t()).t()


@functools.cache
def onednn_is_faster() -> bool:
    """Whether MKL has half of oneDNN's speed here: on AMD's family 26 (Zen 5), as far as has been measured.

    ``FAIRSEQ_PLUGINS_ONEDNN``, 1 or 0, decides for other processors.  Nothing is measured in the process: the two round
    in other ways, and a training that is resumed is to compute as before, whatever else the machine does.

    Raises:
        ValueError: the variable is something else.
    """
    wish = os.environ.get("FAIRSEQ_PLUGINS_ONEDNN", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"FAIRSEQ_PLUGINS_ONEDNN is {wish!r}: 1 multiplies through oneDNN, 0 through MKL")
    return wish == "1" if wish else _family() == ("AuthenticAMD", 26)


def _family() -> tuple[str, int] | None:
    """Maker and family of this processor, where Linux tells them."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(vendor_id|cpu family)\s*: *(.*)$", text, flags=re.MULTILINE))
        return fields["vendor_id"], int(fields["cpu family"])
    return None
