"""Linear maps through whichever of torch's two matrix libraries is faster on this CPU.

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
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_plugins.cpu.packing import BatchPacking
from fairseq_plugins.cpu.products import Packed, can_pack, onednn_product

# A product of fewer multiplications takes microseconds, most of them oneDNN's set-up.
_SMALL = 2**20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packing: BatchPacking | None = None) -> Tensor:
    """Return ``x Wᵀ + b``, as `torch.nn.functional.linear`.

    Args:
        x: (..., K).
        weight: (O, K).
        bias: (O,), or None.
        packing: packed weights of the current batch of translation; None in training.

    Returns:
        (..., O).
    """
    if not uses_onednn(x, packing) or weight.dtype != x.dtype or x.numel() * weight.size(0) < _SMALL:
        return F.linear(x, weight, bias)
    if packing is not None and can_pack(weight) and not torch.is_grad_enabled():
        return packing.packed(Packed, weight, bias)(x)
    y: Tensor = _OneDNNLinear.apply(x.reshape(-1, x.size(-1)), weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)  # a view could not be overwritten without copies


def uses_onednn(x: Tensor, packing: BatchPacking | None = None) -> bool:
    """Return whether `linear` multiplies x through oneDNN, unless the product is very small."""
    return can_pack(x) and (packing is not None or onednn_is_faster())


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
    """Return ``gradᵀ x``, (O, K), in the memory layout of the weight, so that the gradient needs no copy."""
    return onednn_product(grad.t(), x.t()) if weight.is_contiguous() else onednn_product(x.t(), grad.t()).t()


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN is faster than MKL here: on AMD's family 26 (Zen 5), where it is twice as fast.

    ``FAIRSEQ_PLUGINS_ONEDNN``, 1 or 0, overrides the choice.  Nothing is timed at run time: the two libraries round
    differently, and a resumed training must compute as before, whatever the load of the machine.

    Raises:
        ValueError: the variable is neither 1 nor 0.
    """
    wish = os.environ.get("FAIRSEQ_PLUGINS_ONEDNN", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"FAIRSEQ_PLUGINS_ONEDNN must be 1 (oneDNN) or 0 (MKL), got {wish!r}")
    return wish == "1" if wish else _family() == ("AuthenticAMD", 26)


def _family() -> tuple[str, int] | None:
    """Return vendor and family of this processor, or None where Linux does not tell them."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(vendor_id|cpu family)\s*: *(.*)$", text, flags=re.MULTILINE))
        return fields["vendor_id"], int(fields["cpu family"])
    return None
