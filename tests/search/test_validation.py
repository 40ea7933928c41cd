"""Validation by BLEU and chrF in several processes."""

from __future__ import annotations

from pathlib import Path

from tests.commands import MODEL, QUIET, SIZES, TRAINING, USER_DIR, shown, train_two_processes_as_one


def test_two_processes_validate_as_one(data: Path, tmp_path: Path) -> None:
    """The second process has fewer batches, and its last one is not counted."""
    common = [data, "--user-dir", USER_DIR, "--arch", "convs2s", *MODEL, *SIZES, *TRAINING, *QUIET, "--dropout", 0]
    common += ["--task", "translation_fast", "--batch-size-valid", 6, "--max-epoch", 2]
    common += ["--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 9}', "--best-checkpoint-metric", "chrf"]
    first, single, _ = train_two_processes_as_one(tmp_path, *common, "--maximize-best-checkpoint-metric")
    scores = [[(line["valid_bleu"], line["valid_chrf"]) for line in shown(log, "valid")] for log in (first, single)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    assert all(float(chrf) > 0 for _, chrf in scores[0])
