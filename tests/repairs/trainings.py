"""Trainings with a checkpoint after every third update, and how they fail."""

from __future__ import annotations

import resource
from pathlib import Path

from tests import faults


def options(data: Path, updates: int, architecture: str = "convs2s_tiny") -> list[object]:
    """A training with a checkpoint after every third update."""
    family = faults.FAMILIES[architecture].split()
    return [data, "--arch", architecture, *family, *faults.COMMON, "--max-update", updates, "--no-epoch-checkpoints"]


def contents(save: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in save.iterdir() if path.name != "log"}


def fail(words: list[object], save: Path, file_size: int = resource.RLIM_INFINITY) -> str:
    """Start a training that fails and changes nothing; returns the last line of its output."""
    before = contents(save)
    process = faults.start(words, save, file_size)
    process.join()
    assert process.exitcode == 1
    assert contents(save) == before
    return (save / "log").read_text().splitlines()[-1]


def updates(state: dict) -> int:
    return state["optimizer_history"][-1]["num_updates"]
