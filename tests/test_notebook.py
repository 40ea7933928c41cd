"""The cells of the quickstart's notebook run in turn, and its outputs are small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart" / "attention.ipynb"


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_its_cells_run(tmp_path: Path) -> None:
    """Trainings end after three updates (``miniature``); everything else runs as for readers."""
    folder = tmp_path / "examples" / "quickstart"
    folder.mkdir(parents=True)
    for name in ("run.sh", "make_data.py", "report.py"):
        (folder / name).symlink_to(NOTEBOOK.with_name(name))
    (tmp_path / "user_dir").symlink_to(ROOT / "user_dir")
    (folder / "cells.py").write_text("\n\n".join("".join(cell["source"]) for cell in cells()))
    environment = {
        **os.environ,
        "MPLBACKEND": "agg",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'tests' / 'miniature'}:{ROOT}",
    }
    command = [sys.executable, "cells.py"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr[-3000:]
    assert result.stdout.startswith("sacreBLEU ")
    assert result.stdout.splitlines()[1] == "He was born on February 7, 1953."
    assert result.stdout.splitlines()[-1].startswith("layer 3: ")


def test_it_is_shown_whole_and_small() -> None:
    """All cells have outputs in order, so that the notebook can be read without running it."""
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    assert all(cell["outputs"] for cell in cells())
    assert NOTEBOOK.stat().st_size < 100_000
    assert os.environ.get("HOME", "/") == "/" or os.environ["HOME"] not in NOTEBOOK.read_text("utf-8")
