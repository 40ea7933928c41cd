"""Trained models in a folder of ``own-data``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.cli.own_data.folder import BEST, Folder, open_folder

FINISHED = "finished"  # file beside the checkpoints with the options of --train
# Options that only limit the length of a training; they may change when it resumes.
ENDS = ("--max-epoch", "--max-update", "--patience", "--stop-time-hours", "--stop-min-lr")


def is_trained(model: Path) -> bool:
    """Return whether the folder has a finished training and its checkpoint."""
    return (model / FINISHED).exists() and (model / BEST).exists()


def trained_archs(output: Path) -> list[str]:
    """Return the architectures of the trained models in a folder."""
    return sorted(path.parent.name for path in output.glob(f"*/{FINISHED}") if is_trained(path.parent))


def find_model(output: Path, arch: str | None) -> tuple[Folder, Path]:
    """Return a folder of ``own-data`` and the subfolder of a trained model.

    Args:
        output: folder of own-data.
        arch: architecture of the model; None if only one was trained.

    Raises:
        ValueError: there is no such model, or there are several.
    """
    folder, archs = open_folder(output), trained_archs(output)
    if not archs:
        raise ValueError(f"{output} has no trained model yet: run own-data again to finish its training")
    if arch is None and len(archs) > 1:
        raise ValueError(f"{output} has several trained models: give --arch {' or '.join(archs)}")
    if arch is not None and arch not in archs:
        raise ValueError(f"--arch {arch}: {output} has no such trained model; give --arch {' or '.join(archs)}")
    return folder, output / (arch or archs[0])


@dataclass(frozen=True)
class Base:
    """The base model of an adaptation.

    Attributes:
        folder: its folder of own-data.
        checkpoint: its checkpoint, in a subfolder with the name of its architecture.
    """

    folder: Folder
    checkpoint: Path

    @property
    def arch(self) -> str:
        """Return the architecture."""
        return self.checkpoint.parent.name

    @property
    def wishes(self) -> list[str]:
        """Return the options that --train gave when the model was trained."""
        return shlex.split((self.checkpoint.parent / FINISHED).read_text(encoding="utf-8"))


def find_base(path: Path, arch: str | None) -> Base:
    """Return the base model for a folder of own-data or a checkpoint in it.

    Args:
        path: the folder or checkpoint.
        arch: architecture of the model; None if only one was trained.

    Raises:
        ValueError: there is no such model, or there are several.
    """
    if path.is_file():
        folder, _ = find_model(path.parent.parent, path.parent.name)
        if arch not in (None, path.parent.name):
            raise ValueError(f"--arch {arch}: {path} has the architecture {path.parent.name}; omit --arch")
        return Base(folder, path)
    folder, model = find_model(path, arch)
    return Base(folder, model / BEST)


def without_ends(wishes: Sequence[str]) -> list[str]:
    """Return options of fairseq-train, except limits of the training."""
    kept: list[str] = []
    words = iter(wishes)
    for word in words:
        if word in ENDS:
            next(words, None)
        elif word.partition("=")[0] not in ENDS:
            kept.append(word)
    return kept
