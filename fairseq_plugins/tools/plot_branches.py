"""``fairseq-plugins plot-branches``: how κ and α of a Weighted Transformer's layer develop (the paper's Figure 3)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from torch import Tensor

from fairseq_plugins.tools.figure import new_figure

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoints of one training, or the folder that holds them (--save-interval-updates makes them)",
    )
    parser.add_argument(
        "--layer", default="encoder.0", metavar="SIDE.N", help="encoder.N or decoder.N, from 0 (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="picture to write: .png, .pdf, .svg")


def run(args: Namespace) -> None:
    """Draw both vectors over the updates.

    Raises:
        ValueError: a checkpoint is missing, has no such layer, or matplotlib is not installed.
    """
    updates, vectors = read(list_files(args.checkpoints), args.layer)
    draw(updates, vectors, args.layer, args.output)
    print(f"{len(updates)} checkpoints, updates {updates[0]} to {updates[-1]}\n{args.output}")


def list_files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths``, and the checkpoints in its folders."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("checkpoint*.pt")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise ValueError(f"{path}: no checkpoint there")
        files += found
    return files


def read(files: Sequence[Path], layer: str) -> tuple[list[int], dict[str, Tensor]]:
    """The updates of the checkpoints, in order, and κ and α at each of them, (updates, M)."""
    points: dict[int, dict[str, Tensor]] = {}
    side, _, number = layer.partition(".")
    prefix = f"{side}.layers.{number}.branches."
    for file in files:
        state = load_checkpoint_to_cpu(str(file))
        found = {
            vector: state["model"][f"{prefix}{vector}.weight"].float()
            for vector in ("kappa", "alpha")
            if f"{prefix}{vector}.weight" in state["model"]
        }
        if not found:
            raise ValueError(f"{file} has no branch weights for layer {layer!r} (such as encoder.0 or decoder.5)")
        if softmax(state):
            found = {vector: torch.softmax(value, dim=0) for vector, value in found.items()}
        points[state["optimizer_history"][-1]["num_updates"]] = found
    updates = sorted(points)
    return updates, {
        vector: torch.stack([points[update][vector] for update in updates]) for vector in points[updates[0]]
    }


def softmax(state: dict[str, Any]) -> bool:
    """Whether the checkpoint holds logits."""
    return str(getattr(state["cfg"]["model"], "branch_constraint", "simplex")) == "softmax"


def draw(updates: Sequence[int], vectors: dict[str, Tensor], layer: str, output: Path) -> None:
    """One panel for each vector, one line for each branch."""
    figure = new_figure(5 * len(vectors), 3.5)
    panels = figure.subplots(1, len(vectors), sharey=True, squeeze=False)[0]
    for panel, (vector, values) in zip(panels, vectors.items(), strict=True):
        panel.plot(updates, values.numpy(), marker="." if len(updates) < 50 else None)
        panel.set_title(f"{vector}, {layer}")
        panel.set_xlabel("updates")
        panel.set_ylim(bottom=0)
    panels[-1].legend([f"branch {branch + 1}" for branch in range(values.size(1))], fontsize="small")
    figure.savefig(output, dpi=150, bbox_inches="tight")
