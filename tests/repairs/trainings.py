"""Trainings for tests: how they are started, resumed and fail."""

from __future__ import annotations

import resource
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import faults
from tests.commands import one_of_two


def words(data: Path, *options: object, architecture: str = "convs2s_tiny") -> list[object]:
    """Return a command line with the family's optimizer and a checkpoint after every third update."""
    return [data, "--arch", architecture, *faults.FAMILIES[architecture].split(), *faults.COMMON, *options]


def options(data: Path, updates: int, architecture: str = "convs2s_tiny") -> list[object]:
    """Return a command line that trains up to a number of updates."""
    return words(data, "--max-update", updates, architecture=architecture)


def train(data: Path, save: Path, *options: object, architecture: str = "convs2s_tiny") -> dict[str, Any]:
    """Train in a folder, and return the last checkpoint."""
    save.mkdir(exist_ok=True)
    return faults.finish(faults.start(words(data, *options, architecture=architecture), save), save)


def resume(command: list[object], save: Path) -> dict[str, Any]:
    """Run a command in an existing folder, and return the last checkpoint."""
    return faults.finish(faults.start(command, save), save)


def fork(command: list[object], save: Path) -> list[BaseProcess]:
    """Start two ranks by hand, forked from this process."""
    command = [*command, *one_of_two(save)]
    return [faults.start([*command, rank], save) for rank in range(2)]


def contents(save: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in save.iterdir() if path.name != "log"}


def fail(command: list[object], save: Path, file_size: int = resource.RLIM_INFINITY) -> str:
    """Start a training that fails and changes nothing; return the last line of its output."""
    save.mkdir(exist_ok=True)
    before = contents(save)
    process = faults.start(command, save, file_size)
    process.join()
    assert process.exitcode == 1
    assert contents(save) == before
    return (save / "log").read_text().splitlines()[-1]


def updates(state: dict[str, Any]) -> int:
    return state["optimizer_history"][-1]["num_updates"]
