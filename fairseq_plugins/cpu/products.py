"""Products with packed weights, in float32, bfloat16 or int8.

A product of a few rows spends much of its time on a CPU reordering the weight into the layout that the kernel reads.
oneDNN, a part of torch, can keep the weight in this layout (packed).  With a packed 1536 x 1024 matrix on two AVX-512
cores, a product of 80 rows takes 0.7 of the time, and a product of 5 rows 0.45.

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

    Compiled code calls a custom operator that looks the object up by its number at run time.  The same code thus works
    with all weights of a shape, and the compiler need not trace the product.

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
    """Return a product with inputs, weights and outputs in bfloat16, and sums in float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    low = None if bias is None else bias.bfloat16()
    return lambda x: onednn_product(x.bfloat16(), packed, low).float()


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a product with weights in 255 steps per output, inputs in 256 steps per product, and float32 outputs.

    A CPU without VNNI adds two products in 16 bits, which overflow unless inputs have only 128 steps.

    The step size of inputs is shared by all rows of a product, so rows that are not finite are multiplied separately,
    in float32.
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
    """Return a matrix, (O, K), in int8, and the size of a step, (O,): the largest magnitude of each row over 127."""
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
    """Return whether a weight can be packed here; not in a graph that is exported, which packs weights itself."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
    )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x Wᵀ + b``, computed by oneDNN with a plain or a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def has_onednn() -> bool:
    """Return whether this torch has oneDNN's linear maps, which are not public."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
