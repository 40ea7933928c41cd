"""Linear maps and block-diagonal products, computed fast on CPUs.

torch contains two matrix libraries for CPUs, MKL and oneDNN.  By default, torch multiplies float32 matrices with MKL.
On AMD's Zen 5, MKL has half the speed of oneDNN.  On Zen 4, oneDNN is faster only if it needs no copy of an input.
This module uses the faster library.  In training, a model's large logits reuse memory (`_LargeLinear`).

K inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from fairseq_plugins.cpu.packing import BatchWeights, PackedLinear, can_pack, onednn_product

# `linear` uses oneDNN only for matrix products with at least this number of multiplications.  In smaller products,
# oneDNN's set-up takes most of the time.
_MIN_MULTIPLICATIONS = 2**20

# By default, glibc returns each freed block of at least this number of bytes to the operating system.
_LARGE = 2**25


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    batch_weights: BatchWeights | None = None,
    reuse_memory: bool = False,
) -> Tensor:
    """Return ``x Wᵀ + b``, see `F.linear`: x (..., K), weight (O, K) -> (..., O).

    Args:
        x, weight, bias: as in `F.linear`.
        batch_weights: packed weights of the current batch, for translation.
        reuse_memory: whether a large result may take the memory of an earlier result; see `_LargeLinear`.
    """
    if weight.dtype != x.dtype:
        return F.linear(x, weight, bias)
    if uses_onednn(x, batch_weights) and x.numel() * weight.size(0) >= _MIN_MULTIPLICATIONS:
        if batch_weights is not None and can_pack(weight) and not torch.is_grad_enabled():
            return batch_weights.packed(PackedLinear, weight, bias)(x)
        function: type[torch.autograd.Function] = _OneDNNLinear
    elif reuse_memory and _is_large(x, weight):
        function = _LargeLinear
    else:
        return F.linear(x, weight, bias)
    y: Tensor = function.apply(x.reshape(-1, x.size(-1)), weight, bias)
    # If x is a matrix, return y itself, not a view of y.  If the caller overwrites a view in place, the backward pass
    # copies the gradient of the view.
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


def uses_onednn(x: Tensor, batch_weights: BatchWeights | None = None, with_copy: bool = False) -> bool:
    """Return whether to use oneDNN for large products with x; see `onednn_is_faster` for ``with_copy``."""
    return can_pack(x) and (batch_weights is not None or onednn_is_faster(with_copy))


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(ctx, grad, onednn_product, onednn_product if onednn_is_faster(with_copy=True) else F.linear)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Return whether gradients are enabled, and the product with the weight has at least `_LARGE` bytes on a CPU."""
    return (
        not torch.compiler.is_compiling()  # first, because the comparison of sizes would restrict a compiled program
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and x.shape[:-1].numel() * weight.size(0) * x.element_size() >= _LARGE
    )


class _LargeLinear(torch.autograd.Function):
    """A linear map that stores its output in the memory of an earlier output, if a gradient overwrote that output.

    Without reuse, the operating system clears new memory for the logits, page by page, at each update.  A gradient in
    the memory of an output means that nothing may read this output any more, or keep the gradient after the backward
    pass; see `label_smoothed_nll_loss`.  All tensors in a block share a version, so a second backward pass through the
    same loss fails if its gradient was overwritten.  A block is kept until a larger output needs memory.  Unlike
    `F.linear`, this function has no second derivatives.
    """

    blocks: ClassVar[dict[torch.dtype, Tensor]] = {}  # flat memory to reuse, at most one block for each precision

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        size = len(x) * len(weight)
        block = _LargeLinear.blocks.pop(x.dtype, None)
        if block is None or len(block) < size:
            block = x.new_empty(size)
        y = block[:size].view(len(x), -1)
        ctx.memory = StorageWeakRef(y.untyped_storage())
        torch.mm(x, weight.t(), out=y) if bias is None else torch.addmm(bias, x, weight.t(), out=y)
        return y.detach()  # autograd would refuse in-place operations on a view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gradients = _gradients(ctx, grad, F.linear, F.linear)
        memory = grad.untyped_storage()
        if StorageWeakRef(memory) == ctx.memory:
            elements = memory.nbytes() // grad.element_size()
            _LargeLinear.blocks[grad.dtype] = grad.detach().as_strided((elements,), (1,), 0)
        return gradients


def _gradients(
    ctx: Any, grad: Tensor, product: Callable[..., Tensor], product_of_transposed: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias; both functions compute a product like `F.linear`."""
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias = ctx.needs_input_grad
    grad_weight = None
    if for_weight:
        # The gradient gets the weight's memory layout, so that autograd need not copy it.
        by_row = weight.is_contiguous()
        left, right = (grad, x) if by_row else (x, grad)
        grad_weight = product_of_transposed(left.t(), right.t())
        grad_weight = grad_weight if by_row else grad_weight.t()
    return product(grad, weight.t()) if for_x else None, grad_weight, grad.sum(dim=0) if for_bias else None


@functools.cache
def onednn_is_faster(with_copy: bool = False) -> bool:
    """Return whether to use oneDNN instead of MKL.

    ``with_copy`` says whether oneDNN needs a copy of an input that MKL does not need: windows of a convolution, or a
    transposed matrix.

    The environment variable ``FAIRSEQ_PLUGINS_ONEDNN`` overrides the choice: 1 selects oneDNN, 0 selects MKL.  The
    libraries round differently, and a resumed training must compute the same numbers.  Therefore the choice depends on
    the model of the CPU, not on a measurement.
    """
    choice = os.environ.get("FAIRSEQ_PLUGINS_ONEDNN", "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"FAIRSEQ_PLUGINS_ONEDNN must be 1 (oneDNN) or 0 (MKL), got {choice!r}")
    return choice == "1" if choice else _zen() == 5 or (_zen() == 4 and not with_copy)


@functools.cache
def _zen() -> int:
    """Return 4 or 5 on an AMD CPU of this Zen generation according to ``/proc/cpuinfo``, and 0 on other CPUs."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(vendor_id|cpu family|flags)\s*: *(.*)$", text, flags=re.MULTILINE))
        match fields["vendor_id"], int(fields["cpu family"]):
            case "AuthenticAMD", 25 if "avx512f" in fields["flags"].split():  # Zen 3 has this family, but no AVX-512
                return 4
            case "AuthenticAMD", 26:
                return 5
    return 0


def add_block_diagonal(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``y_i + x_i W_i`` for each of M blocks of columns, and overwrite y.

    A batched product needs operands of the shape (M, ...), and would have to copy x and y into this layout.  On a CPU,
    this function therefore computes one product per block, which reads and writes the block's columns in place.  GPUs
    use the batched product.  `torch.export` also uses the batched product, because it rejects in-place products.

    Args:
        y: summands y_i side by side, (N, M·b), which is also the result's shape; do not use y afterwards.
        x: inputs x_i side by side, (N, M·a).
        weight: blocks W_i, (M, a, b).
    """
    x, weight = x.to(y.dtype), weight.to(y.dtype)  # under autocast, y, x and weight may differ in precision
    if y.device.type != "cpu" or torch.compiler.is_compiling():
        return batched(y, x, weight)
    return _AddInPlace.apply(y, x, weight)


def batched(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the result of `add_block_diagonal` with plain PyTorch, without overwriting y."""
    rows, by_block = (part.unflatten(1, (len(weight), -1)).transpose(0, 1) for part in (y, x))
    return torch.baddbmm(rows, by_block, weight).transpose(0, 1).flatten(1)


class _AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mark_dirty(y)
        for x_i, w_i, y_i in zip(_split(x, weight), weight, _split(y, weight), strict=True):
            y_i.addmm_(x_i, w_i)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for x_i, w_i, g_i, grad_x_i, grad_w_i in zip(
            _split(x, weight), weight, _split(grad, weight), _split(grad_x, weight), grad_weight, strict=True
        ):
            torch.mm(g_i, w_i.t(), out=grad_x_i)
            torch.mm(x_i.t(), g_i, out=grad_w_i)
        return grad, grad_x, grad_weight


def _split(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(len(weight), dim=1)
