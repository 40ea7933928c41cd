"""Find a trained model in a folder of own-data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.cli.own_data.folder import Folder, existing

FINISHED = "finished"  # beside the checkpoints, with the options of --train
BEST = "checkpoint_best.pt"
# Options that only say when a training ends: they may change when it goes on.
ENDS = ("--max-epoch", "--max-update", "--patience", "--stop-time-hours", "--stop-min-lr")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model of own-data.

    Attributes:
        folder: its text, subwords and data.
        model: folder of its checkpoints.
        checkpoint: one of its checkpoints, the best if none is named.
    """

    folder: Folder
    model: Path
    checkpoint: Path

    @property
    def wishes(self) -> list[str]:
        """Return the options of fairseq-train that it was trained with besides own-data's."""
        return shlex.split((self.model / FINISHED).read_text(encoding="utf-8"))


def find_trained(path: Path, arch: str | None = None) -> TrainedModel:
    """Return the trained model in a folder of own-data, or that of a checkpoint in one.

    Args:
        path: OUT, OUT/ARCH or OUT/ARCH/checkpoint*.pt.
        arch: architecture, if the folder has several.

    Raises:
        ValueError: there is none, or not exactly one.
    """
    if path.is_file() or is_trained(path):
        checkpoint = path if path.is_file() else path / BEST
        model = checkpoint.parent
        models = [model] if is_trained(model) else []
    else:
        models = trained_in(path)
        if arch is not None:
            models = [model for model in models if model.name == arch]
        elif len(models) > 1:
            names = " or ".join(model.name for model in models)
            raise ValueError(f"{path}: several models are trained there; choose one by --arch {names}")
        checkpoint = models[0] / BEST if models else path
    folder = existing(models[0].parent) if models else None
    if folder is None:
        raise ValueError(f"{path}: own-data has trained no {arch or 'model'} there")
    if arch not in (None, models[0].name):
        raise ValueError(f"--arch {arch}: {path} is a model of {models[0].name}")
    return TrainedModel(folder, models[0], checkpoint)


def is_trained(model: Path) -> bool:
    """Return whether a training has ended there, and its model is still there."""
    return (model / FINISHED).exists() and (model / BEST).exists()


def trained_in(folder: Path) -> list[Path]:
    """Return the folders of the models that are trained in a folder of own-data."""
    return sorted(path.parent for path in folder.glob(f"*/{FINISHED}") if is_trained(path.parent))


def without_ends(wishes: Sequence[str]) -> list[str]:
    """Return options of fairseq-train without those that only say when it ends."""
    kept: list[str] = []
    words = iter(wishes)
    for word in words:
        if word in ENDS:
            next(words, None)
        elif word.partition("=")[0] not in ENDS:
            kept.append(word)
    return kept
