"""Products with packed weights, in float32, bfloat16 or int8, and a cache of these weights for successive batches.

A matrix product on a CPU first reorders the weight into the layout that the kernel reads.  For products with few rows,
this reordering takes much of the time.  oneDNN, a part of torch, can keep the weight in this layout; the weight is then
called packed.  On two AVX-512 cores, the product of 80 rows with a packed 1536 x 1024 matrix takes 0.7 times as long as
with the plain matrix, and the product of 5 rows takes 0.45 times as long.  In int8, torch's quantisation operators pack
the weight for oneDNN or FBGEMM.

A `PackedLinear` holds one packed weight.  A `BatchWeights` holds the packed weights of one batch, and a
`PackedWeightCache` keeps them for the next batch.  Modules that multiply with weights have an attribute
``batch_weights``.  `with_batch_weights` copies a module and sets this attribute to the `BatchWeights` of a batch.

N rows, K inputs, O outputs; a weight is (O, K), and a bias (O,) or None.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_Value = TypeVar("_Value")
_Make = Callable[[Tensor, Tensor | None, str], _Value]
_Tensors = TypeVar("_Tensors", bound=tuple[Tensor, ...])
Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor, Tensor | None], Product]


class PackedLinear:
    """The map ``x -> x Wᵀ + b``, (..., K) -> (..., O), with a packed copy of the weight.

    Compiled code calls a custom operator, which finds this object by its ``number`` at run time.  The same compiled
    code therefore works with all weights of the same shape, and the compiler does not trace the product.  The precision
    is a key of `PRECISIONS`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str = "float32") -> None:
        pack, _ = PRECISIONS[precision]
        bias = None if bias is None else bias.detach().clone()  # copy: the caller may modify the original bias
        self._product = pack(weight.detach(), bias)
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
    """Return a function that rounds inputs, weights and outputs to bfloat16, and adds in float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    low = None if bias is None else bias.bfloat16()
    return lambda x: onednn_product(x.bfloat16(), packed, low).float()


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a function that multiplies int8 inputs by int8 weights and returns float32 outputs.

    Weights are rounded to 255 steps, with one step size per output.  Inputs are rounded to 256 steps, with one step
    size for all rows.  If one row contained infinity or NaN, the step size would be useless for all rows.  Such a row
    is therefore multiplied separately, in float32.

    A CPU without VNNI adds pairs of products in 16 bits.  To avoid an overflow on such a CPU, inputs are rounded to
    only 128 steps.
    """
    if not weight.isfinite().all():
        return _pack_float32(weight, bias)
    steps, scale = quantise(weight)
    zero = torch.zeros(len(scale), dtype=torch.long)
    table = torch._make_per_channel_quantized_tensor(steps, scale.double(), zero, 0)
    quantized, has_vnni = torch.backends.quantized, torch.cpu._is_vnni_supported()
    with _ENGINE_LOCK:
        before = quantized.engine
        # With VNNI, the engine "x86" takes five times as long as "onednn" for wide layers and many rows.
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
    """Return a matrix, (O, K), in int8, and each row's step size, (O,): the row's largest magnitude divided by 127."""
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
    """Return ``x Wᵀ + b``, computed by oneDNN from a packed or plain weight W."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def has_onednn() -> bool:
    """Return whether this version of torch has the operators for oneDNN's products, which are not a public API."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedWeightCache:
    """A thread-safe cache of the packed weights of a task's models.

    fairseq writes to ``.data``, which changes weights without increasing their version counter.  The cache
    therefore identifies a weight by its product with a fixed random vector, and computes this product once per batch.
    A weight is packed again if any bit of its product with the random vector has changed.  Entries that a batch does
    not use are dropped.  If the CPU does not support the precision, the cache warns and uses float32.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"--cpu-dtype {precision}: this CPU or torch does not support it, using float32")
            precision = "float32"
        self.precision = precision
        # This dictionary of the last batch's entries is never modified, because other threads may read it.
        self._entries: dict[object, object] = {}
        self._has_warned = False

    def __reduce__(self) -> tuple[type[PackedWeightCache], tuple[str]]:
        """Return how ``copy`` and ``pickle`` rebuild the cache: with the same precision, and without entries."""
        return PackedWeightCache, (self.precision,)

    @contextmanager
    def for_batch(self) -> Iterator[BatchWeights]:
        """Yield the packed weights of a batch; afterwards, keep the entries that the batch has used."""
        batch = BatchWeights(self.precision, self._entries)
        yield batch
        self._entries = batch.entries
        if not batch.entries and self.precision != "float32" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"--cpu-dtype {self.precision} does nothing here: it needs a float32 model of this plugin on a CPU"
            )


class BatchWeights:
    """The packed weights of one batch, some taken from the previous batch; weights must not change during the batch."""

    def __init__(self, precision: str, previous: dict[object, object]) -> None:
        self.precision = precision
        self.entries: dict[object, object] = {}
        self._previous = previous
        # The keys are ids of weights.  Each value keeps its weight alive, because Python could otherwise give the id of
        # a deleted weight to another tensor.
        self._fingerprints: dict[int, tuple[Tensor, object]] = {}

    def packed(self, make: _Make[_Value], weight: Tensor, bias: Tensor | None) -> _Value:
        """Return the result of ``make(weight, bias, precision)``, which is cached until weight or bias changes."""
        key = make, self._fingerprint_of(weight), None if bias is None else self._fingerprint_of(bias)
        return self._get_or_make(key, lambda: make(weight, bias, self.precision))

    def cached(self, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
        """Return the result of ``compute(*weights)``, which is cached until one of the weights changes.

        ``compute`` must return new tensors that depend only on the weights.  Callers must not modify these tensors.
        """
        key = compute, *(self._fingerprint_of(weight) for weight in weights)
        result = self._get_or_make(key, lambda: compute(*weights))
        for index, tensor in enumerate(result):
            self._fingerprints[id(tensor)] = tensor, (key, index)
        return result

    def _get_or_make(self, key: object, make: Callable[[], _Value]) -> _Value:
        value = self.entries[key] = self.entries.get(key) or self._previous.get(key) or make()
        return cast("_Value", value)

    def _fingerprint_of(self, weight: Tensor) -> object:
        found = self._fingerprints.get(id(weight))
        if found is None:
            found = self._fingerprints[id(weight)] = weight, _fingerprint(weight.detach())
        return found[1]


def with_batch_weights(module: ModuleT, batch_weights: BatchWeights | None) -> ModuleT:
    """Return a copy of the module that shares the module's tensors and uses the given packed weights, if any."""
    if batch_weights is None:
        return module
    twin = copy.copy(module)
    twin._modules = {name: part and with_batch_weights(part, batch_weights) for name, part in module._modules.items()}
    if hasattr(twin, "batch_weights"):
        vars(twin)["batch_weights"] = batch_weights
    return twin


def prepare_linear(
    weight: Tensor, bias: Tensor | None, rows: int, batch_weights: BatchWeights | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the function ``x -> x Wᵀ + b`` for many calls without gradients, while the weight does not change.

    ``rows`` is the largest number of rows in a call.  The weight should be contiguous.
    """
    if batch_weights is not None and can_pack(weight):
        packed = batch_weights.packed(PackedLinear, weight, bias)
    # Packing a weight takes about as long as three products, and does not make products with a single row faster.
    elif rows > 1 and can_pack(weight):
        packed = PackedLinear(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # Return a `functools.partial` object: torch 2.6 would recompile a step for each new `PackedLinear` object, but does
    # not recompile a step for each new `functools.partial` object.
    return partial(PackedLinear.__call__, packed)


def cached(batch_weights: BatchWeights | None, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
    """Return ``compute(*weights)``; if ``batch_weights`` is given and the weights can be packed, cache the result."""
    if batch_weights is not None and can_pack(weights[0]):
        return batch_weights.cached(compute, *weights)
    return compute(*weights)


def _fingerprint(weight: Tensor) -> object:
    """Return a fingerprint of a weight, by which `BatchWeights` detects changes of the weight.

    The fingerprint of a vector is its bytes.  The fingerprint of a matrix contains the bytes of the matrix's product
    with a random vector.  The sums of the matrix's rows would be slightly faster to compute than this product, but if
    two columns were swapped, these sums would hardly change and the fingerprint could miss the swap.
    """
    if weight.dim() == 1:
        return weight.numpy().tobytes()
    rows = weight if weight.is_contiguous() else weight.t()
    return weight.shape, weight.stride(), onednn_product(_probe(rows.size(1)), rows).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
