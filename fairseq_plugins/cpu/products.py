"""Products with packed weights, in float32, bfloat16 or int8.

A matrix product on a CPU first reorders the weight into the layout that the kernel reads.  For products with few rows,
this takes much of the time.  oneDNN, a part of torch, can keep the weight in this layout; the weight is then called
packed.  Packing a 1536 x 1024 matrix makes the product take 0.7 times as long for 80 rows, and 0.45 times as long for 5
rows (two AVX-512 cores).

N rows, K inputs, O outputs.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor, Tensor | None], Product]


class PackedLinear:
    """The map ``x -> x Wᵀ + b``, (..., K) -> (..., O), with the weight at the time of packing.

    Compiled code calls a custom operator, which finds this object by its ``number`` at run time.  The same compiled
    code therefore works with all weights of a shape, and the compiler does not trace the product.

    Args:
        weight: (O, K), float32.
        bias: (O,), or None.
        precision: a key of `PRECISIONS` that the CPU supports.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str = "float32") -> None:
        pack, _ = PRECISIONS[precision]
        self._product = pack(
            weight.detach(), None if bias is None else bias.detach().clone()
        )  # the caller may modify it
        self.outputs = len(weight)
        self.number = torch.tensor(next(_NUMBERS))
        _NUMBERED[int(self.number)] = self

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.fairseq_plugins.packed_linear(x, self.number, self.outputs)
        return self._product(x)


_ENGINE_LOCK = threading.Lock()  # torch has one quantisation engine for all threads
_NUMBERS = itertools.count()
_NUMBERED: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_OPERATORS = torch.library.Library("fairseq_plugins", "DEF")
_OPERATORS.define("packed_linear(Tensor x, Tensor number, SymInt outputs) -> Tensor")
_OPERATORS.impl("packed_linear", lambda x, number, _: _NUMBERED[number.item()]._product(x), "CPU")
_OPERATORS.impl("packed_linear", lambda x, _, outputs: x.new_empty(*x.shape[:-1], outputs), "Meta")


def _pack_float32(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: onednn_product(x, packed, bias)


def _pack_bfloat16(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a product whose inputs, weights and outputs are rounded to bfloat16, and whose sums are float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    low = None if bias is None else bias.bfloat16()
    return lambda x: onednn_product(x.bfloat16(), packed, low).float()


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a product with int8 weights and inputs, and float32 outputs.

    Weights are rounded to 255 steps, with one step size per output.  Inputs are rounded to 256 steps, with one step
    size for all rows.  An input row that is not finite would spoil this step size for the other rows, so it is
    multiplied separately, in float32.

    A CPU without VNNI adds pairs of products in 16 bits.  Inputs then have only 128 steps, to avoid an overflow.
    """
    if not weight.isfinite().all():
        return _pack_float32(weight, bias)
    steps, scale = quantise(weight)
    zero = torch.zeros(len(scale), dtype=torch.long)
    table = torch._make_per_channel_quantized_tensor(steps, scale.double(), zero, 0)
    quantized, has_vnni = torch.backends.quantized, torch.cpu._is_vnni_supported()
    with _ENGINE_LOCK:
        before = quantized.engine
        # With VNNI, "x86" takes five times as long as "onednn" for wide layers and many rows.
        quantized.engine = "onednn" if has_vnni and weight.numel() > 2**22 else "x86"
        try:
            packed = torch.ops.quantized.linear_prepack(table, bias)
        finally:
            quantized.engine = before

    def product(x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, packed, not has_vnni)

    def multiply(x: Tensor) -> Tensor:
        if math.isfinite(x.sum().item()):
            return product(x)
        finite = x.isfinite().all(dim=-1)
        y = product(x.where(finite.unsqueeze(-1), 0))
        rounded, offset = torch.ops.quantized.linear_unpack(packed)
        y[~finite] = F.linear(x[~finite], rounded.dequantize(), offset)
        return y

    return multiply


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix, (O, K), in int8, and the step size of each row, (O,): its largest magnitude divided by 127."""
    scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    return has_onednn() and torch.cpu._is_avx512_bf16_supported()


def _has_int8() -> bool:
    return torch.cpu._is_avx2_supported() and {"onednn", "x86"} <= set(torch.backends.quantized.supported_engines)


PRECISIONS: dict[str, tuple[Pack, Callable[[], bool]]] = {
    "float32": (_pack_float32, lambda: True),
    "bfloat16": (_pack_bfloat16, has_bfloat16),
    "int8": (_pack_int8, _has_int8),
}


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight can be packed.

    Code that is being compiled or exported does not pack weights: its graph has to contain the plain weights.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
    )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x Wᵀ + b`` by oneDNN; the weight W can be packed or not."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def has_onednn() -> bool:
    """Return whether this version of torch has the operators for oneDNN's products, which are not a public API."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
