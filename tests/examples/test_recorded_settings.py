"""Results of other settings are refused."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.commands import ROOT

refuse_other_settings = runpy.run_path(str(ROOT / "examples" / "recorded_settings.py"))["refuse_other_settings"]


def test_existing_results_must_have_the_same_settings(tmp_path: Path) -> None:
    """Other settings are allowed if there are no results, for example after a failed call."""
    record, made = tmp_path / "record.json", tmp_path / "made"
    refuse_other_settings(record, {"data": tmp_path}, tmp_path.glob("made"))
    refuse_other_settings(record, {"data": "b"}, tmp_path.glob("made"))
    made.touch()
    refuse_other_settings(record, {"data": "b"}, tmp_path.glob("made"))
    for other in ({"data": "c"}, {"data": "b", "width": 1}):
        with pytest.raises(ValueError, match=f"^{tmp_path} .*(data b, not c|width None, not 1)"):
            refuse_other_settings(record, other, tmp_path.glob("made"))
