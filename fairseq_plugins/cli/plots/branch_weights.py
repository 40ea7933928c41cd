"""κ and α of a Weighted Transformer's layers, out of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from torch import Tensor


class Vector(NamedTuple):
    """The place of a κ or an α in the model."""

    side: str
    layer: int
    name: str


def read(files: Sequence[Path], layer: str | None) -> tuple[list[int], dict[Vector, Tensor]]:
    """The updates of the checkpoints, in order, and κ and α of a layer or of all at each of them, (updates, M).

    Raises:
        ValueError: a file has no such weights, or others than another of as many updates.
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
                    raise ValueError(f"{file}: {parameter} is not a vector of finite numbers")
                found[Vector(match[1], int(match[2]), match[3])] = point
        if not found:
            wanted = "" if layer is None else f" for layer {layer!r} (such as encoder.0 or decoder.5)"
            raise ValueError(f"{file} has no branch weights{wanted}")
        before = points.setdefault(updates, found)
        if any(not torch.equal(value, before[vector]) for vector, value in found.items()):
            raise ValueError(f"{file} has other weights than another file of {updates} updates: give one training's")
    order = sorted(points)
    return order, {vector: torch.stack([points[updates][vector] for updates in order]) for vector in points[order[0]]}


def holds_logits(state: dict[str, Any]) -> bool:
    """Whether κ and α are softmaxes of what is learned."""
    return str(getattr(state["cfg"]["model"], "branch_constraint", "simplex")) == "softmax"
