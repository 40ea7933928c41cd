"""Draw how a Weighted Transformer's branch weights κ and α change during training (Ahmed et al. 2017, figure 3)."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fairseq_plugins
from fairseq_plugins.cli.figure import add_picture, line_styles, new_figure, save
from fairseq_plugins.common.files import naming_file_in_errors, refuse_input_as_output

if TYPE_CHECKING:
    from torch import Tensor

_GREEK = {"kappa": "κ", "alpha": "α"}


class Vector(NamedTuple):
    """Name of a vector κ or α: side (encoder or decoder), number of the layer, and ``kappa`` or ``alpha``."""

    side: str
    layer: int
    name: str


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoints of one training, or their folder (fairseq-train --save-interval-updates writes them)",
    )
    parser.add_argument(
        "--layer", metavar="SIDE.N", help="layer to draw: encoder.N or decoder.N, counted from 0 (default: all layers)"
    )
    add_picture(parser)


def run(args: Namespace) -> None:
    """Draw κ and α over the updates."""
    files = list_files(args.checkpoints)
    refuse_input_as_output(args.output, files)
    fairseq_plugins.install()
    with naming_file_in_errors(files[0], "or a later checkpoint cannot be drawn"):
        updates, vectors = read(files, args.layer)
        draw(updates, vectors, args.output)
    print(f"{len(updates)} checkpoints, updates {updates[0]} to {updates[-1]}\n{args.output}")


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files in ``paths``, and the checkpoints in the folders in ``paths``."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("checkpoint*.pt")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise ValueError(f"{path}: no checkpoint found; give a checkpoint or a folder with checkpoint*.pt")
        files += found
    return files


def read(files: Sequence[Path], layer: str | None) -> tuple[list[int], dict[Vector, Tensor]]:
    """Return the checkpoints' numbers of updates in order, and κ and α of one or all layers.

    Each κ and α has the shape (updates, branches).
    """
    import torch
    from fairseq import checkpoint_utils

    points: dict[int, dict[Vector, Tensor]] = {}
    averages: dict[int, dict[Vector, Tensor]] = {}
    for file in files:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(file))
        updates = state["optimizer_history"][-1]["num_updates"]
        found: dict[Vector, Tensor] = {}
        for parameter, value in state["model"].items():
            match = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.branches\.(kappa|alpha)\.weight", parameter)
            if match and layer in (None, f"{match[1]}.{match[2]}"):
                point = value.float().softmax(dim=0) if holds_logits(state) else value.float()
                if point.dim() != 1 or not point.numel() or not point.isfinite().all():
                    raise ValueError(f"{file}: {parameter} is not a vector of finite numbers; use another checkpoint")
                found[Vector(match[1], int(match[2]), match[3])] = point
        if not found:
            if layer is not None:
                raise ValueError(f"{file}: no branch weights for --layer {layer}; use encoder.N or decoder.N")
            raise ValueError(f"{file}: no branch weights; give a checkpoint of a Weighted Transformer")
        if "last_optimizer_state" in state and state["last_optimizer_state"] is None:
            # An average of checkpoints has the number of updates of its last checkpoint, but other weights.
            averages.setdefault(updates, found)
            continue
        before = points.setdefault(updates, found)
        if any(not torch.equal(value, before[vector]) for vector, value in found.items()):
            raise ValueError(
                f"{file}: differs from another checkpoint of update {updates}; give checkpoints of one training"
            )
    points = averages | points
    order = sorted(points)
    return order, {vector: torch.stack([points[updates][vector] for updates in order]) for vector in points[order[0]]}


def holds_logits(state: dict[str, Any]) -> bool:
    """Return whether the checkpoint stores logits, whose softmaxes are κ and α."""
    return str(getattr(state["cfg"]["model"], "branch_constraint", "simplex")) == "softmax"


def draw(updates: Sequence[int], vectors: dict[Vector, Tensor], output: Path) -> None:
    """Draw a row for each layer, columns for κ and α, and a line for each branch; a dotted line marks equal weights."""
    kinds = list(dict.fromkeys((vector.side, vector.name) for vector in vectors))
    layers = sorted({vector.layer for vector in vectors})
    figure = new_figure(0.5 + 2.5 * len(kinds), 0.9 + 1.8 * len(layers))
    panels = figure.subplots(len(layers), len(kinds), sharex=True, sharey=True, squeeze=False)
    for (side, layer, name), values in vectors.items():
        panel = panels[layers.index(layer)][kinds.index((side, name))]
        panel.axhline(1 / values.size(1), color="grey", linestyle=":", linewidth=1)
        for branch, line in enumerate(values.t()):
            marker = "." if len(updates) < 20 else None
            panel.plot(updates, line.numpy(), **line_styles(branch), linewidth=1.2, marker=marker)
        panel.set_title(f"{_GREEK[name]}, {side}.{layer}", fontsize="medium")
    panels[0][0].set_ylim(0, 1.05 * max(float(values.max()) for values in vectors.values()))
    figure.supxlabel("updates", fontsize="medium")
    figure.supylabel("weight", fontsize="medium")
    lines = max((panel.lines[1:] for panel in panels.flat), key=len)
    names = [f"branch {branch + 1}" for branch in range(len(lines))]
    figure.legend(lines, names, loc="outside upper center", ncols=min(len(lines), 2 * len(kinds)), fontsize="small")
    save(figure, output)
