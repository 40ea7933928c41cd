"""The cache of packed weights: what translation computes of weights, kept from batch to batch and never stale.

A `Packed` is one weight.  A `BatchPacking` holds the packed weights of one batch, and a `Packing` keeps them for the
next batch.  Modules that multiply have an attribute ``packing``; `with_packing` makes twins of them for one batch.

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

from fairseq_plugins.cpu.products import PRECISIONS, Packed, can_pack, onednn_product

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_Kept = TypeVar("_Kept")
_Make = Callable[[Tensor, Tensor | None, str], _Kept]
_Tensors = TypeVar("_Tensors", bound=tuple[Tensor, ...])


class Packing:
    """The packed weights of all models that a task translates with; safe for any number of threads.

    fairseq writes weights in ways that no version counter shows (through ``.data``, in models that stay in evaluation
    mode), so a packed weight is looked up by what the weight does to a fixed random vector, computed once per batch.  A
    changed weight is packed again, unless its products with that vector are bitwise equal.  Weights that a batch does
    not use are dropped.

    Args:
        precision: one of `products.PRECISIONS`; float32, with a warning, if the CPU has no instructions for it.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"this CPU or torch has no fast {precision} products: float32 is used")
            precision = "float32"
        self.precision = precision
        self._kept: dict[object, object] = {}  # of the last batch; never written to
        self._has_warned = False

    def __reduce__(self) -> tuple[type[Packing], tuple[str]]:
        """A copy, in this process or another, packs for itself."""
        return Packing, (self.precision,)

    @contextmanager
    def for_batch(self) -> Iterator[BatchPacking]:
        """Yield the packed weights of a batch, and keep those that it used for the next one."""
        batch = BatchPacking(self.precision, self._kept)
        yield batch
        self._kept = batch.kept
        if not batch.kept and self.precision != "float32" and not self._has_warned:
            self._has_warned = True
            logger.warning(f"{self.precision} changes nothing here: it is for float32 models of this plugin on a CPU")


class BatchPacking:
    """The packed weights of one batch, during which no weight changes.

    Args:
        precision: as in `Packing`.
        before: what an earlier batch has left.

    Attributes:
        kept: what this batch leaves.
    """

    def __init__(self, precision: str, before: dict[object, object]) -> None:
        self.precision = precision
        self.kept: dict[object, object] = {}
        self._before = before
        # Each fingerprint with its weight, so that no other tensor gets the same id.
        self._fingerprints: dict[int, tuple[Tensor, object]] = {}

    def packed(self, make: _Make[_Kept], weight: Tensor, bias: Tensor | None) -> _Kept:
        """Return ``make(weight, bias, precision)``, from the cache if neither tensor has changed.

        Args:
            make: `products.Packed`, or another function that packs.
            weight: (O, K).
            bias: (O,), or None.
        """
        key = make, self._fingerprint(weight), None if bias is None else self._fingerprint(bias)
        return self._keep(key, lambda: make(weight, bias, self.precision))

    def cached(self, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
        """Return ``compute(*weights)``: new tensors, which depend on nothing else and which nobody overwrites."""
        key = compute, *(self._fingerprint(weight) for weight in weights)
        result = self._keep(key, lambda: compute(*weights))
        for place, each in enumerate(result):
            self._fingerprints[id(each)] = each, (key, place)
        return result

    def _keep(self, key: object, make: Callable[[], _Kept]) -> _Kept:
        kept = self.kept[key] = self.kept.get(key) or self._before.get(key) or make()
        return cast("_Kept", kept)

    def _fingerprint(self, weight: Tensor) -> object:
        found = self._fingerprints.get(id(weight))
        if found is None:
            found = self._fingerprints[id(weight)] = weight, _effect(weight.detach())
        return found[1]


def with_packing(module: ModuleT, packing: BatchPacking | None) -> ModuleT:
    """Return a twin that multiplies with the packed weights of a batch and shares all tensors with the module."""
    if packing is None:
        return module
    twin = copy.copy(module)
    twin._modules = {name: part and with_packing(part, packing) for name, part in module._modules.items()}
    if hasattr(twin, "packing"):
        vars(twin)["packing"] = packing
    return twin


def prepare_linear(
    weight: Tensor, bias: Tensor | None, rows: int, packing: BatchPacking | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the map ``x -> x Wᵀ + b`` for many calls without gradients, with the weight as it is now.

    Args:
        weight: (O, K), best contiguous.
        bias: (O,), or None.
        rows: rows of x in the first call; later calls may have fewer.
        packing: as in `linear.linear`.
    """
    if packing is not None and can_pack(weight):
        packed = packing.packed(Packed, weight, bias)
    # One row is a matrix-vector product, which reads the weight as it lies; packing costs as much as about three steps.
    elif rows > 1 and can_pack(weight):
        packed = Packed(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # Not the object itself: torch 2.6 would compile a step again for each such object.
    return partial(Packed.__call__, packed)


def cached(packing: BatchPacking | None, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
    """Return ``compute(*weights)``, once for all batches of a generator; see `BatchPacking.cached`."""
    return packing.cached(compute, *weights) if packing is not None and can_pack(weights[0]) else compute(*weights)


def _effect(weight: Tensor) -> object:
    """Return the product of a random vector and the weight, as it lies in memory, bit by bit; a vector is its own.

    Sums would be a little faster, but hardly change when columns change places.
    """
    if weight.dim() == 1:
        return weight.numpy().tobytes()
    rows = weight if weight.is_contiguous() else weight.t()
    return weight.shape, weight.stride(), onednn_product(_probe(rows.size(1)), rows).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
