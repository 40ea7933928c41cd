"""Repairs are probed without temporary files, which a read-only container has no place for."""

from __future__ import annotations

from pathlib import Path

from tests.commands import USER_DIR, run

NOWHERE = """import tempfile

def refuse(*arguments, **options):
    raise OSError(30, "Read-only file system")

tempfile.mkdtemp = tempfile.mkstemp = tempfile.NamedTemporaryFile = tempfile.TemporaryFile = refuse
"""


def test_a_command_makes_no_temporary_file_when_it_starts(data: Path, tmp_path: Path) -> None:
    """It gets as far as the model that is not there.  fairseq itself asks where temporary files would be."""
    (tmp_path / "sitecustomize.py").write_text(NOWHERE)
    words = [data, "--user-dir", USER_DIR, "--path", tmp_path / "model.pt"]
    errors = run("interactive", *words, path=tmp_path, succeeds=False).stderr
    assert "Read-only" not in errors
    assert "Model file not found" in errors
