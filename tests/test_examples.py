"""The scripts of the examples print their usage."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.commands import ROOT, script

# The benchmark itself starts its contestants' scripts.
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.py"))
    if "__main__" in path.read_text("utf-8") and not path.name.startswith("ctranslate2_")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help(path: Path) -> None:
    result = script(path, "--help")
    assert result.returncode == 0
    name = path.parent.name if path.name == "__main__.py" else path.name  # a folder that Python runs
    assert result.stdout.startswith(f"usage: {name} ")


def test_the_quickstart_does_not_remove_other_files(tmp_path: Path) -> None:
    (tmp_path / "data-bin").mkdir()
    command = ["bash", str(ROOT / "examples" / "quickstart" / "run.sh")]
    result = subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode().startswith(f"OUT: {tmp_path} contains another data-bin")
    assert (tmp_path / "data-bin").exists()


def test_the_quickstart_runs_again_in_its_folder(tmp_path: Path) -> None:
    """Logs in the folder, such as the notebook's, are allowed; results of earlier runs are replaced."""
    (tmp_path / "text").mkdir()
    for name in ("codes", "text/train.en", "log.txt"):
        (tmp_path / name).touch()
    command = ["bash", str(ROOT / "examples" / "quickstart" / "run.sh")]
    environment = {**os.environ, "OUT": str(tmp_path), "PATH": "/usr/bin:/bin", "ARCH": "none"}
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert b"== 1. Data" in result.stdout
    assert not (tmp_path / "text" / "train.en").exists()
