"""Linear maps and weight normalisation (Salimans & Kingma 2016): ``w = g v / |v|``.

A normalised weight w is computed from its parameters g and v each time w is read, because training updates g and v.
For decoding, w is computed only once; this is called folding.  In checkpoints, g and v have the names that torch's
parametrisation uses.  torch's parametrisation itself is not used, because it changes the class of a module.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fairseq_plugins.cpu.linear import linear
from fairseq_plugins.cpu.packing import BatchWeights

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Names of the two parts of a normalised weight in a state dict.
MAGNITUDE = "parametrizations.weight.original0"
DIRECTION = "parametrizations.weight.original1"


class Normalised(nn.Module):
    """The weight ``g v / |v|``, with one norm per index of dimension ``dim``."""

    def __init__(self, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.original0 = nn.Parameter(torch.norm_except_dim(weight.detach(), 2, dim))
        self.original1 = nn.Parameter(weight.detach())

    def forward(self) -> Tensor:
        """Return the weight."""
        return torch._weight_norm(self.original1, self.original0, self.dim)


class WeightNormalisable(nn.Module):
    """A module whose ``weight`` is a parameter, a buffer, or the result of a weight normalisation."""

    @property
    def weight(self) -> Any:
        """The current weight."""
        for tensors in (self._parameters, self._buffers):
            if "weight" in tensors:
                return tensors["weight"]
        if (normalised := self.normalised) is None:
            raise AttributeError("weight")
        return normalised()

    @property
    def normalised(self) -> Normalised | None:
        """The normalisation of the weight, or None for a plain weight."""
        parts: Any = self._modules.get("parametrizations")
        return parts and parts["weight"]

    def normalise_weight_(self, dim: int) -> None:
        """Replace the plain weight by a normalised one with the same value."""
        weight = self.weight
        del self._parameters["weight"]
        self.parametrizations = nn.ModuleDict({"weight": Normalised(weight, dim)})

    def remove_weight_norm_(self) -> None:
        """Replace the normalised weight by its current value."""
        weight = self.weight
        del self.parametrizations
        self.register_parameter("weight", nn.Parameter(weight))


class Linear(WeightNormalisable, nn.Linear):  # type: ignore[override]  # torch's weight is a parameter
    """A linear map, computed by `cpu.linear.linear`.

    Attributes:
        batch_weights: packed weights of the current batch; set by `with_batch_weights`.
        reuse_memory: whether a large output may take the memory of an earlier output, as a model's logits may.
    """

    batch_weights: BatchWeights | None = None
    reuse_memory = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) -> (..., O)."""
        return linear(x, self.weight, self.bias, self.batch_weights, self.reuse_memory)


def normalised_linear(inputs: int, outputs: int, retain: float = 1.0) -> Linear:
    """Return a linear map with a normalised weight and a bias of zero, initialised as in ConvS2S (appendix A).

    The initial weight has the standard deviation √(p/n) for n inputs, which dropout retains with probability p.
    """
    module = Linear(inputs, outputs)
    nn.init.normal_(module.weight, mean=0, std=math.sqrt(retain / inputs))
    nn.init.zeros_(module.bias)
    module.normalise_weight_(dim=0)
    return module


def _normalised_parts(module: nn.Module) -> list[WeightNormalisable]:
    return [part for part in module.modules() if isinstance(part, WeightNormalisable) and part.normalised is not None]


def has_weight_norm(module: nn.Module) -> bool:
    """Return whether ``module`` has normalised weights."""
    return bool(_normalised_parts(module))


def remove_weight_norm_(module: nn.Module) -> None:
    """Replace every normalised weight in ``module`` by its current value."""
    for part in _normalised_parts(module):
        part.remove_weight_norm_()


def without_weight_norm(module: ModuleT, *shared: object) -> ModuleT:
    """Return a copy of ``module`` without weight normalisation; the copy has plain weights with the same values.

    The copy and ``module`` share all other tensors.  The objects in ``shared`` are not copied.
    """
    keep: itertools.chain[object] = itertools.chain(module.parameters(), module.buffers(), shared)
    twin = copy.deepcopy(module, {id(item): item for item in keep})
    remove_weight_norm_(twin)
    return twin


def fold_weight_norm_(state_dict: dict[str, Tensor], module: nn.Module) -> None:
    """Replace normalised weights in a checkpoint by their values wherever ``module`` has a plain weight."""
    plain = {name for name, _ in module.named_parameters()}
    for key in [key for key in state_dict if key.endswith(MAGNITUDE)]:
        prefix = key[: -len(MAGNITUDE)]
        if prefix + "weight" in plain:
            magnitude, direction = state_dict.pop(key), state_dict.pop(prefix + DIRECTION)
            state_dict[prefix + "weight"] = folded_weight(magnitude, direction)


def folded_weight(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Return ``g v / |v|``.  The norm of v is computed over the dimensions in which g has size 1."""
    normed = [axis for axis, size in enumerate(magnitude.shape) if size == 1]
    return direction * (magnitude / torch.linalg.vector_norm(direction, dim=normed, keepdim=True))
