"""Some outputs of a linear map at the cost of those alone, for an output layer of which a batch needs few words.

V outputs, K inputs, n selected outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["LINEAR_MAPS", "selected_rows"]

LINEAR_MAPS: set[Callable[..., Tensor]] = {nn.Linear.forward}  # what computes ``x Wᵀ + b``; a backend adds its own


def selected_rows(linear: nn.Module, rows: Tensor) -> nn.Linear:
    """The map from x, (..., K), to the selected outputs of a linear map, (..., n), as that is now.

    Gradients go to its parameters.  A normalised weight has a norm for each row, so only the selected rows are
    normalised.  Weight and bias are buffers, so that a copy of the module around this one can share them as it shares
    parameters.

    Args:
        linear: a map with a weight (V, K), which may be normalised by torch's parametrisation or its older hook.
        rows: the outputs wanted, (n,); where negative none is, and minus infinity comes out.

    Raises:
        ValueError: the map is not linear, or its weight is computed in some other way.
    """
    found = rows.clamp(min=0)
    weight, *magnitude = (part.index_select(0, found) for part in _parts(linear))
    if magnitude:
        weight = torch._weight_norm(weight, magnitude[0], 0)
    bias: Any = linear.bias
    bias = weight.new_zeros(len(rows)) if bias is None else bias.index_select(0, found)
    selected = nn.Linear(weight.size(1), len(rows), device="meta")
    del selected.weight, selected.bias  # no parameters of its own
    selected.register_buffer("weight", weight, persistent=False)
    selected.register_buffer("bias", bias.masked_fill(rows < 0, -torch.inf), persistent=False)
    return selected


def _parts(module: nn.Module) -> tuple[Tensor, ...]:
    """What the weight is made of row by row: itself, (V, K), or its direction, (V, K), and magnitude, (V, 1)."""
    if isinstance(module, nn.Linear) and type(module).forward in LINEAR_MAPS:
        normed: Any = module
        parametrisations = [each for every in getattr(normed, "parametrizations", {}).values() for each in every]
        match [*normed._forward_pre_hooks.values(), *parametrisations]:
            case []:
                return (normed.weight,)
            case [WeightNorm(name="weight", dim=0)]:
                return normed.weight_v, normed.weight_g
            case [_WeightNorm(dim=0)] if parametrize.is_parametrized(normed, "weight"):
                return normed.parametrizations.weight.original1, normed.parametrizations.weight.original0
    raise ValueError(f"{type(module).__name__} is not a linear map with a weight that is plain or normalised by row")
