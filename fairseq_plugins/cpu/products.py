"""Products with weights laid out for the processor's products, in fewer bits where that is wanted.

On the CPU a product of a few rows spends much of its time bringing the weight into the order in which the kernel reads
it.  oneDNN, which torch ships, can keep a weight in that order: with a 1536 x 1024 matrix on two AVX-512 cores a
product of 80 rows then takes 0.7 of the time, one of 5 rows 0.45.

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


class Packed:
    """The map ``x -> x Wᵀ + b``, (..., K) -> (..., O), with the weight as it is now.

    A compiled program calls it as an operator, by a number that it reads when it runs: so a program serves all weights
    of a shape, and what is inside needs no compiler.

    Args:
        weight: (O, K), float32.
        bias: (O,), or None.
        precision: one of `PRECISIONS`, which the processor has.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str = "float32") -> None:
        pack, _ = PRECISIONS[precision]
        self._product = pack(weight.detach(), None if bias is None else bias.detach().clone())  # it may be overwritten
        self.outputs = len(weight)
        self.number = torch.tensor(next(_NUMBERS))
        _NUMBERED[int(self.number)] = self

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.fairseq_plugins.packed_linear(x, self.number, self.outputs)
        return self._product(x)


_ENGINE = threading.Lock()  # of torch, for all threads together
_NUMBERS = itertools.count()
_NUMBERED: WeakValueDictionary[int, Packed] = WeakValueDictionary()
_OPERATORS = torch.library.Library("fairseq_plugins", "DEF")
_OPERATORS.define("packed_linear(Tensor x, Tensor number, SymInt outputs) -> Tensor")
_OPERATORS.impl("packed_linear", lambda x, number, _: _NUMBERED[number.item()]._product(x), "CPU")
_OPERATORS.impl("packed_linear", lambda x, _, outputs: x.new_empty(*x.shape[:-1], outputs), "Meta")


def _pack_float32(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: onednn_product(x, packed, bias)


def _pack_bfloat16(weight: Tensor, bias: Tensor | None) -> Product:
    """Inputs and outputs are rounded to bfloat16, sums are in float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    low = None if bias is None else bias.bfloat16()
    return lambda x: onednn_product(x.bfloat16(), packed, low).float()


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Weights are rounded to 255 steps for each output, inputs to 256 for each product; outputs are float32.

    Without VNNI two products are added in 16 bits: they fit where inputs are rounded to 128 steps.

    Rows of inputs that are not finite have no such steps, nor would the others of their product: they stay in float32.
    """
    if not weight.isfinite().all():
        return _pack_float32(weight, bias)
    steps, scale = quantised(weight)
    zero = torch.zeros(len(scale), dtype=torch.long)
    table = torch._make_per_channel_quantized_tensor(steps, scale.double(), zero, 0)
    quantized, has_vnni = torch.backends.quantized, torch.cpu._is_vnni_supported()
    with _ENGINE:
        before = quantized.engine
        # With VNNI "x86" chooses well but for wide layers and many rows, where it takes five times oneDNN's time.
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


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix, (O, K), in steps of the 127th part of each row's largest number, and these steps' size, (O,)."""
    scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def _has_bfloat16() -> bool:
    return has_onednn() and torch.cpu._is_avx512_bf16_supported()


def _has_int8() -> bool:
    return torch.cpu._is_avx2_supported() and {"onednn", "x86"} <= set(torch.backends.quantized.supported_engines)


PRECISIONS: dict[str, tuple[Pack, Callable[[], bool]]] = {
    "float32": (_pack_float32, lambda: True),
    "bfloat16": (_pack_bfloat16, _has_bfloat16),
    "int8": (_pack_int8, _has_int8),
}


def can_pack(weight: Tensor) -> bool:
    """Whether there are packed products with such a weight; an exported program packs for itself."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
    )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` through oneDNN, with a plain weight or one that is packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def has_onednn() -> bool:
    """Whether this torch has oneDNN's linear maps, which are not part of its public interface."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
