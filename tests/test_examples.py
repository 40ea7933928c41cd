"""The scripts of the examples say what they are for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT

# Those of a benchmark's contestant are started by the benchmark.
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.py"))
    if "__main__" in path.read_text("utf-8") and not path.name.startswith("ctranslate2_")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {script.name} ")
