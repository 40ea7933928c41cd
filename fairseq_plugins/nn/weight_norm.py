"""Weight normalisation (Salimans & Kingma 2016), as torch's parametrisation, and the ways out of it.

A normalised weight costs a pass over all parameters each time it is read.  Training needs that; decoding does not.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

__all__ = [
    "DIRECTION",
    "MAGNITUDE",
    "fold_weight_norm_",
    "folded_weight",
    "has_weight_norm",
    "remove_weight_norm_",
    "weight_norm",
    "without_weight_norm",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What a state dict calls the two parts of a normalised weight, after its module's name.
MAGNITUDE = "parametrizations.weight.original0"
DIRECTION = "parametrizations.weight.original1"


def has_weight_norm(module: nn.Module) -> bool:
    """Whether any weight in ``module`` is normalised each time it is read."""
    return any(parametrize.is_parametrized(part, "weight") for part in module.modules())


def remove_weight_norm_(module: nn.Module) -> None:
    """Replace every normalised weight in ``module`` by its present value, for good.

    Not with torch's `remove_parametrizations`: that deletes the weight from the class, which a module shares with its
    deep copies, so it would break every copy (a moving average's, for one).
    """
    for part in list(module.modules()):
        if parametrize.is_parametrized(part, "weight"):
            weight: Any = part.weight
            part.__class__ = parametrize.type_before_parametrizations(part)
            del part.parametrizations
            part.weight = nn.Parameter(weight)


def without_weight_norm(module: ModuleT, *shared: object) -> ModuleT:
    """A twin of ``module`` whose normalised weights are plain values, computed once, now.

    The twin shares all other tensors with ``module``, which stays as it is, and the ``shared`` objects.
    """
    keep: itertools.chain[object] = itertools.chain(module.parameters(), module.buffers(), shared)
    twin = copy.deepcopy(module, {id(item): item for item in keep})
    remove_weight_norm_(twin)
    return twin


def fold_weight_norm_(state_dict: dict[str, Tensor], module: nn.Module) -> None:
    """Rewrite a training checkpoint for ``module``, from which weight normalisation has been removed."""
    plain = {name for name, _ in module.named_parameters()}
    for key in [key for key in state_dict if key.endswith(MAGNITUDE)]:
        prefix = key[: -len(MAGNITUDE)]
        if prefix + "weight" in plain:
            magnitude, direction = state_dict.pop(key), state_dict.pop(prefix + DIRECTION)
            state_dict[prefix + "weight"] = folded_weight(magnitude, direction)


def folded_weight(magnitude: Tensor, direction: Tensor) -> Tensor:
    """``g v / |v|``, with one norm for each entry of the magnitude g, whose other dimensions have size 1."""
    normed = [axis for axis, size in enumerate(magnitude.shape) if size == 1]
    return direction * (magnitude / torch.linalg.vector_norm(direction, dim=normed, keepdim=True))
