"""Every cell of the papers' tables in miniature, by the command that fills the tables."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fairseq import checkpoint_utils

from tests.commands import ROOT, script

ABLATIONS = ROOT / "examples" / "ablations"
UPDATES = 2
BLEU = ["+task.eval_bleu=true", """+task.eval_bleu_args='{"beam": 1, "max_len_b": 3}'"""]


def ablate(
    data: Path, out: Path, family: str, *options: object, overrides: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    words = [family, out, "--data", data, "--updates", UPDATES, "--width", 16, *options]
    return script(ABLATIONS / "ablate.py", *words, "--", "dataset.max_tokens=400", *BLEU, *overrides)


def trainings(out: Path, family: str) -> Iterator[tuple[str, list[dict], Path]]:
    """Yield cell and seed, the log of validations, and the folder of each training."""
    for folder in sorted((out / family).glob("+cell=*")):
        log = (folder / "hydra_train.log").read_text()
        lines = map(json.loads, re.findall(r"\[valid\]\[INFO\] - (\{.*\})", log))
        yield folder.name.removeprefix("+cell="), list(lines), folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["convs2s", "conv_encoder", "weighted_transformer"])
def test_all_tables_are_filled(data: Path, tmp_path: Path, family: str) -> None:
    result = ablate(data, tmp_path, family, "--seeds", 1)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    tables = (tmp_path / f"{family}.md").read_text()
    assert "not filled" not in tables
    perplexities, models = {}, set()
    for name, validations, folder in trainings(tmp_path, family):
        assert int(validations[-1]["valid_num_updates"]) == UPDATES
        best = min(validations, key=lambda line: float(line["valid_loss"]))
        perplexities[name.removesuffix(",common.seed=1")] = f"{float(best['valid_ppl']):.2f}"
        # The best loss is also recorded in trainings that are not the first of their process.
        state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoints" / "checkpoint_best.pt"))
        assert state["extra_state"]["best"] == pytest.approx(float(best["valid_loss"]), abs=1e-3)
        models.add(str(state["cfg"]["model"]))
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", tables, flags=re.MULTILINE)
    assert len(rows) >= len(perplexities) > 10
    assert dict(rows) == perplexities
    assert len(models) == len(perplexities), "a cell changes nothing"
    assert len(list(tmp_path.glob(f"{family}-*.png"))) == tables.count("## ")


def test_a_second_call_fills_the_remaining_cells(data: Path, tmp_path: Path) -> None:
    tmp_path /= "a, ü'(1)"  # hydra's grammar gives these characters a meaning
    tmp_path.mkdir()
    assert "mistyped" in ablate(data, tmp_path, "convs2s", overrides=["mistyped=1"]).stderr
    first = ablate(data, tmp_path, "convs2s", "--tables", 4, "--seeds", 1)
    assert first.returncode == 0, first.stderr[-4000:]
    table = (tmp_path / "convs2s.md").read_text()
    assert table.count("| 1 of 1 |") == 4 + 5  # The base model is a cell of the other tables, too.
    assert "| attention-5 | not filled |  |  | 0 of 1 |" in table
    before = {name: (folder / "hydra_train.log").read_bytes() for name, _, folder in trainings(tmp_path, "convs2s")}
    for checkpoint in tmp_path.rglob("*.pt"):
        checkpoint.unlink()  # Results stay without checkpoints, and have width 16.
    assert f"{tmp_path} has width 16, not 8" in ablate(data, tmp_path, "convs2s", "--width", 8).stderr
    second = ablate(data, tmp_path, "convs2s", "--tables", 4, "--seeds", 1, 2)
    assert second.returncode == 0, second.stderr[-4000:]
    assert "no-positions,common.seed=2" not in before
    assert len(list(trainings(tmp_path, "convs2s"))) == 8
    for name, log in before.items():
        assert (tmp_path / "convs2s" / f"+cell={name}" / "hydra_train.log").read_bytes() == log
    shown = re.findall(r"^\S+, seed \d", second.stdout, flags=re.MULTILINE)
    assert len(shown) == len(set(shown)) == 8
    table = (tmp_path / "convs2s.md").read_text()
    assert re.search(r"^\| base \| [\d.]+ \| [\d.]+ to [\d.]+ \| [\d.]+ \| 2 of 2 \|$", table, flags=re.MULTILINE)
