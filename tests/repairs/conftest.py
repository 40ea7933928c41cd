"""Checkpoints of a training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import faults
from tests.repairs.trainings import options


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints after 3 and 6 updates, the best and the last."""
    folder = tmp_path_factory.mktemp("trained")
    faults.finish(faults.start([*options(data, 6), "--keep-interval-updates", 2], folder), folder)
    return folder


@pytest.fixture
def save(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "save")
    (tmp_path / "save" / "log").unlink()
    return tmp_path / "save"
