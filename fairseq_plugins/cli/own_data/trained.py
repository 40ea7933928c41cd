"""The trained models in a folder of ``own-data``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.cli.own_data.folder import BEST, Folder, open_folder

FINISHED = "finished"  # beside the checkpoints, with the options of --train
# Options that only say when a training ends: they may change when it goes on.
ENDS = ("--max-epoch", "--max-update", "--patience", "--stop-time-hours", "--stop-min-lr")


def is_trained(model: Path) -> bool:
    """Return whether a training has ended there, and its model is still there."""
    return (model / FINISHED).exists() and (model / BEST).exists()


def trained_archs(output: Path) -> list[str]:
    """Return the architectures of the trained models in a folder."""
    return sorted(path.parent.name for path in output.glob(f"*/{FINISHED}") if is_trained(path.parent))


def find_model(output: Path, arch: str | None) -> tuple[Folder, Path]:
    """Return the folder of ``own-data`` with its text, and in it the folder of a trained model.

    Args:
        output: the folder of own-data.
        arch: the model's architecture; None for the only one that has been trained.

    Raises:
        ValueError: there is no such model, or there are several.
    """
    folder, archs = open_folder(output), trained_archs(output)
    if not archs:
        raise ValueError(f"{output} has no trained model yet: call own-data again, which goes on with its training")
    if arch is None and len(archs) > 1:
        raise ValueError(f"{output} has several trained models: choose by --arch {' or '.join(archs)}")
    if arch is not None and arch not in archs:
        raise ValueError(f"--arch {arch}: {output} has no such trained model; --arch {' or '.join(archs)} is there")
    return folder, output / (arch or archs[0])


@dataclass(frozen=True)
class Base:
    """The model that a training starts from.

    Attributes:
        folder: folder of own-data with its text.
        checkpoint: in a folder that is named after its architecture.
    """

    folder: Folder
    checkpoint: Path

    @property
    def arch(self) -> str:
        """Return its architecture."""
        return self.checkpoint.parent.name

    @property
    def wishes(self) -> list[str]:
        """Return the options of fairseq-train with which it was trained besides own-data's."""
        return shlex.split((self.checkpoint.parent / FINISHED).read_text(encoding="utf-8"))


def find_base(path: Path, arch: str | None) -> Base:
    """Return the model in a folder of own-data, or that of one of the checkpoints there.

    Args:
        path: the folder, or the checkpoint.
        arch: the model's architecture; None for the only one that has been trained.

    Raises:
        ValueError: there is no such model, or there are several.
    """
    if path.is_file():
        folder, _ = find_model(path.parent.parent, path.parent.name)
        if arch not in (None, path.parent.name):
            raise ValueError(f"--arch {arch}: {path} is a model of {path.parent.name}")
        return Base(folder, path)
    folder, model = find_model(path, arch)
    return Base(folder, model / BEST)


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
