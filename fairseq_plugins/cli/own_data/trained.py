"""The trained models in a folder of ``own-data``."""

from __future__ import annotations

from pathlib import Path

from fairseq_plugins.cli.own_data.folder import Folder, open_folder

FINISHED = "finished"  # beside the checkpoints, with the options of --train


def is_trained(model: Path) -> bool:
    """Whether a training has ended there, and what it has left is still there."""
    return (model / FINISHED).exists() and (model / "checkpoint_best.pt").exists()


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
