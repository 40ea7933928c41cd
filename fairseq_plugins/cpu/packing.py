"""A cache of packed weights, and of other values that are computed from weights, for successive batches.

A `PackedLinear` holds one packed weight.  A `BatchWeights` holds the packed weights of one batch, and a
`PackedWeightCache` keeps them for the next batch.  Modules that multiply with weights have an attribute ``packing``.
`with_packing` copies a module and sets this attribute to the `BatchWeights` of a batch.

K inputs, O outputs.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.cpu.products import PRECISIONS, PackedLinear, can_pack, onednn_product

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_Value = TypeVar("_Value")
_Make = Callable[[Tensor, Tensor | None, str], _Value]
_Tensors = TypeVar("_Tensors", bound=tuple[Tensor, ...])


class PackedWeightCache:
    """A thread-safe cache of the packed weights of a task's models.

    fairseq can change weights without increasing their version counter, because it writes to ``.data``.  The cache
    therefore identifies a weight by its product with a fixed random vector, which is computed once per batch.  A
    changed weight is packed again, unless its product is bitwise equal to the previous one.  Entries that a batch does
    not use are dropped.

    Args:
        precision: a key of `products.PRECISIONS`.  If the CPU does not support it, the cache warns and uses float32.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"--cpu-dtype {precision}: this CPU or torch does not support it, using float32")
            precision = "float32"
        self.precision = precision
        self._entries: dict[object, object] = {}  # of the last batch; other threads read it, so it is never modified
        self._has_warned = False

    def __reduce__(self) -> tuple[type[PackedWeightCache], tuple[str]]:
        """Make copies and pickles of the cache without its entries."""
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
    """The packed weights of one batch; weights must not change during the batch.

    Args:
        precision: see `PackedWeightCache`.
        previous: entries of an earlier batch.

    Attributes:
        entries: entries that this batch has used.
    """

    def __init__(self, precision: str, previous: dict[object, object]) -> None:
        self.precision = precision
        self.entries: dict[object, object] = {}
        self._previous = previous
        # The keys are ids.  Each value includes the weight itself, so that no other tensor can get its id.
        self._fingerprints: dict[int, tuple[Tensor, object]] = {}

    def packed(self, make: _Make[_Value], weight: Tensor, bias: Tensor | None) -> _Value:
        """Return the result of ``make(weight, bias, precision)``, which is cached until one of the tensors changes.

        Args:
            make: `products.PackedLinear`, or another function that packs a weight.
            weight: (O, K).
            bias: (O,), or None.
        """
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


def with_packing(module: ModuleT, packing: BatchWeights | None) -> ModuleT:
    """Return a copy of the module that shares its tensors and uses the given packed weights, if any."""
    if packing is None:
        return module
    twin = copy.copy(module)
    twin._modules = {name: part and with_packing(part, packing) for name, part in module._modules.items()}
    if hasattr(twin, "packing"):
        vars(twin)["packing"] = packing
    return twin


def prepare_linear(
    weight: Tensor, bias: Tensor | None, rows: int, packing: BatchWeights | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the function ``x -> x Wᵀ + b`` for many calls without gradients, while the weight does not change.

    Args:
        weight: (O, K), preferably contiguous.
        bias: (O,), or None.
        rows: number of rows of x in the first call; later calls may have fewer.
        packing: packed weights of the batch; None in training.
    """
    if packing is not None and can_pack(weight):
        packed = packing.packed(PackedLinear, weight, bias)
    # Packing takes as long as about three steps, and does not make products with a single row faster.
    elif rows > 1 and can_pack(weight):
        packed = PackedLinear(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # torch 2.6 would recompile a step for each `PackedLinear` object.  It does not do so for partial functions.
    return partial(PackedLinear.__call__, packed)


def cached(packing: BatchWeights | None, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
    """Return `BatchWeights.cached` if ``packing`` is given and can be used, and else ``compute(*weights)``."""
    return packing.cached(compute, *weights) if packing is not None and can_pack(weights[0]) else compute(*weights)


def _fingerprint(weight: Tensor) -> object:
    """Return a fingerprint of a weight: the bytes of a vector, or of the product of a matrix with a random vector.

    Sums of rows would be slightly faster to compute, but swapping two columns would hardly change them.
    """
    if weight.dim() == 1:
        return weight.numpy().tobytes()
    rows = weight if weight.is_contiguous() else weight.t()
    return weight.shape, weight.stride(), onednn_product(_probe(rows.size(1)), rows).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
