"""The softmax of attention."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["softmax"]


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, computed at least in float32: half precision loses the small weights."""
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).type_as(scores)
