"""Read κ and α of a Weighted Transformer's layers from checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from torch import Tensor


class Vector(NamedTuple):
    """Name of a κ or α vector: its layer, side and letter."""

    side: str
    layer: int
    name: str


def read(files: Sequence[Path], layer: str | None) -> tuple[list[int], dict[Vector, Tensor]]:
    """Return the sorted numbers of updates of the checkpoints, and κ and α of one layer or all layers, (updates, M).

    Raises:
        ValueError: a file has no such weights, or two files of the same update differ.
    """
    points: dict[int, dict[Vector, Tensor]] = {}
    for file in files:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(file))
        updates = state["optimizer_history"][-1]["num_updates"]
        found: dict[Vector, Tensor] = {}
        for parameter, value in state["model"].items():
            match = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.branches\.(kappa|alpha)\.weight", parameter)
            if match and layer in (None, f"{match[1]}.{match[2]}"):
                point = torch.softmax(value.float(), dim=0) if holds_logits(state) else value.float()
                if point.dim() != 1 or not point.numel() or not point.isfinite().all():
                    raise ValueError(f"{file}: {parameter} is not a vector of finite numbers; use another checkpoint")
                found[Vector(match[1], int(match[2]), match[3])] = point
        if not found:
            if layer is not None:
                raise ValueError(f"{file}: no branch weights for --layer {layer}; use encoder.N or decoder.N")
            raise ValueError(f"{file}: no branch weights; give a checkpoint of a Weighted Transformer")
        before = points.setdefault(updates, found)
        if any(not torch.equal(value, before[vector]) for vector, value in found.items()):
            raise ValueError(f"{file}: differs from another checkpoint of update {updates}; give only one training's")
    order = sorted(points)
    return order, {vector: torch.stack([points[updates][vector] for updates in order]) for vector in points[order[0]]}


def holds_logits(state: dict[str, Any]) -> bool:
    """Return whether κ and α are softmaxes of learned logits, and not the learned parameters themselves."""
    return str(getattr(state["cfg"]["model"], "branch_constraint", "simplex")) == "softmax"
