"""Weights laid out for the processor's products, in fewer bits where that is wanted, and kept from batch to batch.

On the CPU a product of a few rows spends much of its time bringing the weight into the order in which the kernel reads
it.  oneDNN, which torch ships, can keep a weight in that order: with a 1536 x 1024 matrix on two AVX-512 cores a
product of 80 rows then takes 0.7 of the time, one of 5 rows 0.45.

N rows, K inputs, O outputs.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PRECISIONS", "PackedLinear", "Packing", "current_packing", "has_onednn"]

logger = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor, Tensor | None], Product]

_CURRENT: ContextVar[Packing | None] = ContextVar("packing", default=None)


class Packing:
    """The weights of the models that one generator translates with, packed.

    A packed weight is found by what the weight does to a vector, which is computed anew for each batch.  So a weight
    that has changed in any way is packed again, unless its products with that vector are the same numbers: a change
    that is lost in the rounding of a row's sum.  What a batch does not use is forgotten.

    Args:
        precision: one of `PRECISIONS`.  Where the processor has no instructions for it, it is float32, with a warning.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"this processor or torch has no fast {precision} products: float32 is used")
            precision = "float32"
        self.precision = precision
        self._products: dict[object, PackedLinear] = {}
        self._before: dict[object, PackedLinear] = {}
        # Of this batch, whose weights stay as they are; they are kept, so that no other tensor gets the same id.
        self._seen: dict[int, tuple[Tensor, Tensor | None, PackedLinear]] = {}
        self._has_warned = False

    def __reduce__(self) -> tuple[type[Packing], tuple[str]]:
        """A copy, in this process or another, packs for itself."""
        return Packing, (self.precision,)

    @contextmanager
    def for_batch(self) -> Iterator[None]:
        """Within this context linear maps without gradients go through packed weights."""
        self._before, self._products = self._products, {}
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self._before, self._seen = {}, {}
        if not self._products and self.precision != "float32" and not self._has_warned:
            self._has_warned = True
            logger.warning(f"{self.precision} changes nothing here: it is for float32 models of this plugin on a CPU")

    def product(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """The map ``x -> x Wᵀ + b`` with the weight, (O, K), and bias, (O,), as they are in this batch."""
        seen = self._seen.get(id(weight))
        if seen is None or seen[1] is not bias:
            seen = self._seen[id(weight)] = weight, bias, self._find(weight, bias)
        return seen[2]

    def _find(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        key = (weight.shape, _fingerprint(weight), None if bias is None else bias.detach().numpy().tobytes())
        product = self._products.get(key) or self._before.get(key) or PackedLinear(weight, bias, self.precision)
        self._products[key] = product
        return product


def current_packing(weight: Tensor) -> Packing | None:
    """The packing that a product with this weight goes through now, if any."""
    return _CURRENT.get() if can_pack(weight) and not torch.is_grad_enabled() else None


def can_pack(weight: Tensor) -> bool:
    """Whether there are packed products with such a weight; an exported program packs for itself."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
    )


@functools.cache
def has_onednn() -> bool:
    """Whether this torch has oneDNN's linear maps, which are not part of its public interface."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear:
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
            y: Tensor = torch.ops.fairseq_plugins.packed_linear(x, self.number, self.outputs)
            return y
        return self._product(x)


_NUMBERS = itertools.count()
_NUMBERED: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_OPERATORS = torch.library.Library("fairseq_plugins", "DEF")
_OPERATORS.define("packed_linear(Tensor x, Tensor number, SymInt outputs) -> Tensor")
_OPERATORS.impl("packed_linear", lambda x, number, _: _NUMBERED[number.item()]._product(x), "CPU")
_OPERATORS.impl("packed_linear", lambda x, _, outputs: x.new_empty(*x.shape[:-1], outputs), "Meta")


def _pack_float32(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _pack_bfloat16(weight: Tensor, bias: Tensor | None) -> Product:
    """Inputs and outputs are rounded to bfloat16, sums are in float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    low = None if bias is None else bias.bfloat16()
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, low, "none", [], "").float()


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Weights are rounded to 255 steps for each output, inputs to 256 for each product; outputs are float32.

    Rows of inputs that are not finite have no such steps, nor would the others of their product: they stay in float32.
    """
    if not weight.isfinite().all():
        return _pack_float32(weight, bias)
    scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    steps = (weight / scale.unsqueeze(1)).round_().to(torch.int8)
    zero = torch.zeros(len(scale), dtype=torch.long)
    quantised = torch._make_per_channel_quantized_tensor(steps, scale.double(), zero, 0)
    quantized = torch.backends.quantized
    before = quantized.engine
    # The engine "x86" chooses well but for wide layers and many rows, where it takes five times oneDNN's time.
    quantized.engine = "onednn" if weight.numel() > 2**22 else "x86"
    try:
        packed = torch.ops.quantized.linear_prepack(quantised, bias)
    finally:
        quantized.engine = before

    def multiply(x: Tensor) -> Tensor:
        if x.sum().isfinite():
            return torch.ops.quantized.linear_dynamic(x, packed)
        finite = x.isfinite().all(dim=-1)
        y = torch.ops.quantized.linear_dynamic(x.where(finite.unsqueeze(-1), 0), packed)
        rounded, offset = torch.ops.quantized.linear_unpack(packed)
        y[~finite] = F.linear(x[~finite], rounded.dequantize(), offset)
        return y

    return multiply


def _has_bfloat16() -> bool:
    return has_onednn() and torch.cpu._is_avx512_bf16_supported()


def _has_int8() -> bool:
    """Without these instructions (VNNI) sums of products may overflow."""
    return torch.cpu._is_vnni_supported() and {"onednn", "x86"} <= set(torch.backends.quantized.supported_engines)


PRECISIONS: dict[str, tuple[Pack, Callable[[], bool]]] = {
    "float32": (_pack_float32, lambda: True),
    "bfloat16": (_pack_bfloat16, _has_bfloat16),
    "int8": (_pack_int8, _has_int8),
}


def _fingerprint(weight: Tensor) -> bytes:
    """What the weight does to a vector of random numbers, bit by bit."""
    return torch.mv(weight.detach(), _probe(weight.size(1))).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))
