"""fairseq's commands in a folder that contains files of the user."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from fairseq_plugins.cli.processes import fairseq, fairseq_lines
from tests.commands import USER_DIR
from tests.repairs.payloads import code
from tests.repairs.trainings import options, updates


def test_python_files_of_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    for name in ("sacrebleu", "runpy", "numpy", "fairseq_cli", "torch", "argparse"):
        (tmp_path / f"{name}.py").write_text(code(trace))
    (tmp_path / "text").write_text("words\n")
    monkeypatch.chdir(tmp_path)
    lines = list(fairseq_lines("score", "--sys", "text", "--ref", "text"))
    assert any("BLEU4 = " in line for line in lines)
    assert not trace.exists()


def test_the_end_of_a_failed_commands_output_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)^fairseq-score failed .*\nAssertionError: .* not exist$"):
        fairseq("score", "--ref", "text")
    assert capsys.readouterr() == ("", "\n$ fairseq-score --ref text\n")


def test_a_training_with_checkpoints_at_time_intervals(data: Path, tmp_path: Path) -> None:
    """A training that is stopped within an epoch resumes there, and ends like an uninterrupted training."""

    def words(updates: int, save: Path) -> list[object]:
        more = ["--user-dir", USER_DIR, "--log-interval", 1, "--log-format", "json", "--save-interval-updates", 0]
        return [*options(data, updates), *more, "--save-dir", save]

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    before = "from fairseq_plugins.repairs.saving import save_every; save_every(0)"
    with closing(fairseq_lines("train", *words(100_000, stopped), before=before)) as lines:
        for line in lines:
            assert "valid_loss" not in line, "it validates at the ends of epochs only"
            if "train_inner" in line and '"num_updates": "5"' in line:
                break
    done = updates(torch.load(stopped / "checkpoint_last.pt", weights_only=False))
    assert done > 3
    for save in (stopped, whole):
        for _ in fairseq_lines("train", *words(done + 4, save)):
            pass
    states = [torch.load(save / "checkpoint_last.pt", weights_only=False)["model"] for save in (stopped, whole)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
