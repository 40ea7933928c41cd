"""fairseq's commands, started in a folder of somebody else's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairseq_plugins.cli.fairseq_command import fairseq, fairseq_lines
from tests.repairs.payloads import code


def test_python_files_of_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    for name in ("sacrebleu", "runpy", "numpy", "fairseq_cli", "torch", "argparse"):
        (tmp_path / f"{name}.py").write_text(code(trace))
    (tmp_path / "text").write_text("words\n")
    monkeypatch.chdir(tmp_path)
    lines = list(fairseq_lines("score", "--sys", "text", "--ref", "text"))
    assert any("BLEU4 = " in line for line in lines)
    assert not trace.exists()


def test_of_a_command_that_fails_the_end_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)^fairseq-score failed .*\nAssertionError: .* not exist$"):
        fairseq("score", "--ref", "text")
    assert capsys.readouterr() == ("", "\n$ fairseq-score --ref text\n")
