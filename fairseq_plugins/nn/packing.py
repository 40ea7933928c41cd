"""Packed weights that are kept from batch to batch, and never stale.

K inputs, O outputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fairseq_plugins.nn.packed_linear import PRECISIONS, PackedLinear, can_pack

__all__ = ["Packing", "current_packing"]

logger = logging.getLogger(__name__)

_CURRENT: ContextVar[Packing | None] = ContextVar("packing", default=None)


class Packing:
    """The weights of the models that one generator translates with, packed.

    A packed weight is found by what the weight does to a vector, which is computed anew for each batch.  So a weight
    that has changed in any way is packed again, unless its products with that vector are the same numbers: a change
    that is lost in the rounding of a row's sum.  What a batch does not use is forgotten.

    Args:
        precision: one of `fairseq_plugins.nn.packed_linear.PRECISIONS`; where the processor has no instructions for it,
            it is float32, with a warning.
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
        offset = None if bias is None else bias.detach().numpy().tobytes()
        key = (weight.shape, weight.stride(), _fingerprint(weight.detach()), offset)
        product = self._products.get(key) or self._before.get(key) or PackedLinear(weight, bias, self.precision)
        self._products[key] = product
        return product


def current_packing(weight: Tensor) -> Packing | None:
    """The packing that a product with this weight goes through now, if any."""
    return _CURRENT.get() if can_pack(weight) and not torch.is_grad_enabled() else None


def _fingerprint(weight: Tensor) -> bytes:
    """What the weight, as it lies in memory, does to a vector of random numbers, bit by bit.

    Sums would be found a little faster, but hardly change where columns change places.
    """
    weight = weight if weight.is_contiguous() else weight.t()
    probe = _probe(weight.size(1))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(probe, weight, None, "none", [], "")
    return product.numpy().tobytes()


@functools.cache
def _probe(size: int) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(1))
