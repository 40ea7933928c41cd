"""Training for the expected risk with the real commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands import MODEL, QUIET, SIZES, TRAINING, USER_DIR, shown, train, train_two_processes_as_one

CRITERION = ["--criterion", "sequence_risk", "--label-smoothing", 0.1, "--risk-hypotheses", 4]
LOGGED = ("loss", "nll_loss", "ppl", "risk", "best", "oracle", "translations", "search", "scoring")


@pytest.fixture(scope="module")
def start(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("start")
    train(data, save, "--criterion", "cross_entropy", "--max-epoch", 10)
    return save / "checkpoint_best.pt"


def tune(data: Path, start: Path, save: Path, *more: object) -> list[dict[str, Any]]:
    """Return the log of three epochs that start from this model."""
    fine = ["--finetune-from-model", start, "--lr", 0.05, "--max-epoch", 3, "--dropout", 0]
    result = train(data, save, *CRITERION, *fine, *more)
    output = result.stdout + result.stderr
    epochs = shown(output, "train")
    for part, lines in (("train", epochs), ("valid", shown(output, "valid"))):
        assert len(lines) == 3
        for line in lines:
            values = {name: float(line[f"{part}_{name}"]) for name in LOGGED}
            assert 0 <= values["oracle"] <= values["risk"] <= 1
            assert values["oracle"] <= values["best"] <= 1
            assert values["search"] > 0 < values["scoring"]
    return epochs


def test_fine_tuning_lowers_the_risk(data: Path, start: Path, tmp_path: Path) -> None:
    epochs = tune(data, start, tmp_path, "--risk-alpha", 0, "--risk-scale", 4)
    assert float(epochs[-1]["train_risk"]) < float(epochs[0]["train_risk"])
    assert all(float(line["train_translations"]) == 4 for line in epochs)


@pytest.mark.parametrize(
    "more",
    [
        ["--fp16", "--fp16-init-scale", 4, "--update-freq", 2],
        ["--bf16"],
        ["--risk-sampling", "--risk-reference", "--risk-cost", "chrf"],
        ["--task", "translation_fast", "--cpu-dtype", "bfloat16", "--risk-cost", "rougeL"],
    ],
    ids=lambda more: more[0],
)
def test_options(data: Path, start: Path, tmp_path: Path, more: list[object]) -> None:
    if "rougeL" in more:
        pytest.importorskip("rouge_score")
    tune(data, start, tmp_path, *more)


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_processes_are_one_with_twice_the_update_frequency(data: Path, tmp_path: Path, backend: str) -> None:
    common = [data, "--user-dir", USER_DIR, "--arch", "convs2s", *MODEL, *SIZES, *TRAINING, *QUIET, *CRITERION]
    common += ["--dropout", 0, "--max-epoch", 2]
    first, single, _ = train_two_processes_as_one(tmp_path, *common, backend=backend)
    lines = [shown(output, "train")[-1] for output in (first, single)]
    for name in ("risk", "best", "oracle", "nll_loss"):
        assert float(lines[0][f"train_{name}"]) == pytest.approx(float(lines[1][f"train_{name}"]), abs=0.002)
