"""The cache of packed weights and of other values computed from weights, shared by successive batches.

A `PackedLinear` holds one weight.  A `BatchWeights` holds the packed weights of one batch, and a `PackedWeightCache`
keeps them for the next batch.  Modules that multiply have an attribute ``packing``, and `with_packing` makes copies of
them for one batch.

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
    """The cache of packed weights of all models of a task; thread-safe.

    fairseq changes weights without changing their version counter (through ``.data``, in models in evaluation mode).
    The cache therefore identifies a weight by its product with a fixed random vector, computed once per batch.  A
    changed weight is packed again, unless the two products are bitwise equal.  Entries that a batch does not use are
    dropped.

    Args:
        precision: a key of `products.PRECISIONS`; falls back to float32, with a warning, if the CPU lacks support.
    """

    def __init__(self, precision: str = "float32") -> None:
        if not PRECISIONS[precision][1]():
            logger.warning(f"--cpu-dtype {precision}: this CPU or torch does not support it, using float32")
            precision = "float32"
        self.precision = precision
        self._entries: dict[object, object] = {}  # of the last batch; replaced, never modified, since threads share it
        self._has_warned = False

    def __reduce__(self) -> tuple[type[PackedWeightCache], tuple[str]]:
        """Copy or pickle the cache without its entries."""
        return PackedWeightCache, (self.precision,)

    @contextmanager
    def for_batch(self) -> Iterator[BatchWeights]:
        """Yield the packed weights of a batch, and keep the entries that it used for the next batch."""
        batch = BatchWeights(self.precision, self._entries)
        yield batch
        self._entries = batch.entries
        if not batch.entries and self.precision != "float32" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"--cpu-dtype {self.precision} does nothing here: it needs a float32 model of this plugin on a CPU"
            )


class BatchWeights:
    """The packed weights of one batch, during which no weight changes.

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
        # Each entry holds its weight too, so that no other tensor can get the same id.
        self._fingerprints: dict[int, tuple[Tensor, object]] = {}

    def packed(self, make: _Make[_Value], weight: Tensor, bias: Tensor | None) -> _Value:
        """Return ``make(weight, bias, precision)``, from the cache if neither tensor has changed.

        Args:
            make: `products.PackedLinear`, or another function that packs a weight.
            weight: (O, K).
            bias: (O,), or None.
        """
        key = make, self._fingerprint_of(weight), None if bias is None else self._fingerprint_of(bias)
        return self._get_or_make(key, lambda: make(weight, bias, self.precision))

    def cached(self, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
        """Return ``compute(*weights)``, from the cache if no weight has changed.

        ``compute`` must return new tensors that depend on the weights alone, and callers must not modify them.
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
    """Return a copy of the module that multiplies with packed weights and shares all tensors with the original."""
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
    """Return the map ``x -> x Wᵀ + b`` for many calls without gradients, with the current weight.

    Args:
        weight: (O, K), preferably contiguous.
        bias: (O,), or None.
        rows: number of rows of x in the first call; later calls may have fewer.
        packing: packed weights of the batch; None in training.
    """
    if packing is not None and can_pack(weight):
        packed = packing.packed(PackedLinear, weight, bias)
    # A product with one row reads a plain weight just as fast, and packing takes as long as about three steps.
    elif rows > 1 and can_pack(weight):
        packed = PackedLinear(weight, bias)
    else:
        return partial(F.linear, weight=weight, bias=bias)
    # torch 2.6 would recompile a step for each `PackedLinear`, but not for a partial function.
    return partial(PackedLinear.__call__, packed)


def cached(packing: BatchWeights | None, compute: Callable[..., _Tensors], *weights: Tensor) -> _Tensors:
    """Return ``compute(*weights)``, from the cache if there is one; see `BatchWeights.cached`."""
    return packing.cached(compute, *weights) if packing is not None and can_pack(weights[0]) else compute(*weights)


def _fingerprint(weight: Tensor) -> object:
    """Return a fingerprint: the bytes of a vector, or of a matrix's product with a fixed random vector.

    Sums of rows would be slightly faster, but hardly change if columns are swapped.
    """
    if weight.dim() == 1:
        return weight.numpy().tobytes()
    rows = weight if weight.is_contiguous() else weight.t()
    return weight.shape, weight.stride(), onednn_product(_probe(rows.size(1)), rows).numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
