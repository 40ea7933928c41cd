"""Packed weights, and what is computed of weights, kept from batch to batch and never stale.

A `Packed` is one weight; a `BatchPacking` finds those of a batch, and a `Packing` keeps them for the next.

K inputs, O outputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.backends.cpu.products import PRECISIONS, Packed, can_pack, onednn_product

__all__ = ["BatchPacking", "Packing", "cached", "current_packing", "map_of"]

logger = logging.getLogger(__name__)

_Kept = TypeVar("_Kept")
_Make = Callable[[Tensor, Tensor | None, str], _Kept]
_Tensors = TypeVar("_Tensors", bound=tuple[Tensor, ...])

_CURRENT: ContextVar[BatchPacking | None] = ContextVar("packing", default=None)


class Packing:
    """The weights of the models that the generators of a task translate with, packed; for any number of threads.

    A packed weight is found by what the weight does to a vector, which is computed anew for each batch.  So a weight
    that has changed in any way is packed again, unless its products with that vector are the same numbers: a change
    that is lost in the rounding of a row's sum.  What a batch does not use is forgotten.

    Args:
        precision: one of `products.PRECISIONS`; where the processor has no instructions for it, it is float32, with a
            warning.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"this processor or torch has no fast {precision} products: float32 is used")
            precision = "float32"
        self.precision = precision
        self._kept: dict[object, object] = {}  # of the last batch; never written to
        self._has_warned = False

    def __reduce__(self) -> tuple[type[Packing], tuple[str]]:
        """A copy, in this process or another, packs for itself."""
        return Packing, (self.precision,)

    @contextmanager
    def for_batch(self) -> Iterator[None]:
        """Within this context linear maps without gradients go through packed weights."""
        batch = BatchPacking(self.precision, self._kept)
        token = _CURRENT.set(batch)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self._kept = batch.kept
        if not batch.kept and self.precision != "float32" and not self._has_warned:
            self._has_warned = True
            logger.warning(f"{self.precision} changes nothing here: it is for float32 models of this plugin on a CPU")


class BatchPacking:
    """What one batch, whose weights stay as they are, uses of a `Packing`.

    Args:
        precision: as of `Packing`.
        before: what an earlier batch has left.

    Attributes:
        kept: what this one leaves.
    """

    def __init__(self, precision: str, before: dict[object, object]) -> None:
        self.precision = precision
        self.kept: dict[object, object] = {}
        self._before = before
        # With the weights themselves, so that no other tensor gets the same id.
        self._fingerprints: dict[int, tuple[Tensor, object]] = {}

    def packed(self, make: _Make[_Kept], weight: Tensor, bias: Tensor | None) -> _Kept:
        """``make(weight, bias, precision)`` with the weight, (O, K), and bias, (O,) or None, as they are in this batch.

        Args:
            make: `products.Packed`, or what packs in other ways.
        """
        key = make, self._fingerprint(weight), None if bias is None else self._fingerprint(bias)
        return self._keep(key, lambda: make(weight, bias, self.precision))

    def cached(self, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
        """``compute(*weights)``: new tensors, which depend on nothing else and which nobody overwrites."""
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


def map_of(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The map ``x -> x Wᵀ + b``, for many calls without gradients, with the weight as it is now.

    Args:
        weight: (O, K), best contiguous.
        bias: (O,), or None.
        rows: rows of x, at the start; later calls may have fewer.
    """
    if (packing := current_packing(weight)) is not None:
        packed = packing.packed(Packed, weight, bias)
    # One row is a matrix-vector product, which reads the weight as it lies; packing costs as much as about three steps.
    elif rows > 1 and can_pack(weight):
        packed = Packed(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # Not the object itself, for each of which torch 2.6 would compile a step anew.
    return partial(Packed.__call__, packed)


def cached(compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
    """``compute(*weights)``, once for all batches of a generator; see `BatchPacking.cached`."""
    packing = current_packing(weights[0])
    return compute(*weights) if packing is None else packing.cached(compute, *weights)


def current_packing(weight: Tensor) -> BatchPacking | None:
    """The packing that a product with this weight goes through now, if any."""
    return _CURRENT.get() if can_pack(weight) and not torch.is_grad_enabled() else None


def _effect(weight: Tensor) -> object:
    """What the weight, as it lies in memory, does to a vector of random numbers, bit by bit; a vector is its own.

    Sums would be found a little faster, but hardly change where columns change places.
    """
    if weight.dim() == 1:
        return weight.numpy().tobytes()
    rows = weight if weight.is_contiguous() else weight.t()
    return weight.shape, weight.stride(), onednn_product(_probe(rows.size(1)), rows).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
