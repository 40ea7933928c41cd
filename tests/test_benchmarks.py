"""The benchmarks in miniature: scripts run, their checks pass, and their counts are correct."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fairseq_plugins.cpu.packing import PRECISIONS
from tests.commands import ROOT, python, run

BENCHMARKS = ROOT / "examples" / "benchmarks"
TINY = ["--layers", 1, "--vocabulary", 60, "--sentences", 2, "--beam", 2, "--source-length", 5]
FAST = "translation_fast, float32"
FIGURES = runpy.run_path(str(BENCHMARKS / "figures.py"))


def shown_by(script: str, *options: object) -> str:
    finished = python(BENCHMARKS / script, *options, "--threads", 1)
    assert finished.returncode == 0, finished.stdout[-1000:] + finished.stderr[-3000:]
    return finished.stdout


def bench(script: str, folder: Path, *options: object) -> dict[str, Any]:
    """Return the file that a script writes with ``--json``."""
    path = folder / "figures.json"
    shown = shown_by(script, *options, "--rounds", 1, "--json", path)
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["options"]["rounds"] == 1
    assert figures["machine"]["torch"]
    for row in figures["rows"]:  # the table contains all contestants
        assert f"| {row['contestant']} |" in shown
    return figures


def test_generation(tmp_path: Path) -> None:
    sizes = ["--width", 16, "--transformer-layers", 1, "--steps", 4]
    rows = {row["contestant"]: row for row in bench("generation.py", tmp_path, *TINY, *sizes)["rows"]}
    for name in ("convs2s", "weighted_transformer_small"):
        for contestant in (name, f"{name}, {FAST}"):
            assert rows[contestant]["equal"] == rows[contestant]["of"] == 2 * 2
    assert missing_in(rows, "16 sentences") == set()


def missing_in(found: Iterable[str], run: str) -> set[str]:
    """Return the names that figures.py expects in a run, which are not in the results, though nothing prevents them."""
    names = {name for place, *pair in FIGURES["comparisons"]() if place == run for name in pair}
    absent = [] if find_spec("ctranslate2") else ["CTranslate2"]
    absent += [precision for precision, (_, is_supported) in PRECISIONS.items() if not is_supported()]
    return {name for name in names - {*found} if not any(word in name for word in absent)}


def results(seconds: float) -> dict[str, Any]:
    """Return results of figures.py for which each of our models takes ``seconds``, and each other model 6 seconds."""
    found: dict[str, Any] = {each: {} for each in FIGURES["RUNS"]}
    for place, theirs, ours in FIGURES["comparisons"]():
        found[place][ours] = ([seconds, 2 * seconds], 3.0)
        found[place].setdefault(theirs, ([6.0, 6.0], 2.0))
    return found


def test_figures_computes_ratios_of_rounds() -> None:
    """The ratio is the median of the rounds' ratios; a contestant that was not measured has none, and is named."""
    now = results(3.0)
    name = "an update: fconv_iwslt_de_en, float32, versus fconv_iwslt_de_en, fairseq"
    assert FIGURES["speeds_of"](now)[name] == (6 / 3 + 6 / 6) / 2
    memory = "exported: memory of weighted_transformer_small, exported, int8, beam 5, versus CTranslate2, int8"
    assert FIGURES["memories_of"](now)[memory] == 3 / 2
    written = FIGURES["read_ratios"](FIGURES["render"]("a heading | with a bar |", now))
    assert written == pytest.approx(FIGURES["speeds_of"](now) | FIGURES["memories_of"](now), abs=0.005)
    del now["an update"]["fconv_iwslt_de_en, fairseq"]
    assert FIGURES["speeds_of"](now)[name] is None
    assert FIGURES["moved"](written, {**written, name: 1.09 * written[name]}) == []
    assert name in FIGURES["moved"](written, {**written, name: 1.2 * written[name]})[0]


def test_figures_knows_which_code_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed code makes the table old; changed pages, tables, comments and docstrings do not."""
    places = ("fairseq_plugins/code.py", "examples/benchmarks/log.md", "examples/benchmarks/figures/table.txt")
    code, page, table = (tmp_path / place for place in places)
    monkeypatch.setitem(FIGURES["check"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(FIGURES["check"].__globals__, "PAGES", table)
    for path in (code, page, table):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('def twice(x):\n    """First."""\n    return 2 * x\n')
    for words in (["init", "--quiet"], ["add", "-A"], ["commit", "--quiet", "--message=c"]):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b", *words], check=True)
    table.write_text("machine; commit HEAD\n")
    page.write_text("second")
    code.write_text('def twice(x):\n    """Second."""\n    return 2 * x  # a comment\n')
    FIGURES["check"]()
    code.write_text('def twice(x):\n    """First."""\n    return 3 * x\n')
    with pytest.raises(SystemExit, match=r"fairseq_plugins/code\.py"):
        FIGURES["check"]()
    table.write_text("machine; commit 1234567\n")
    with pytest.raises(SystemExit, match="1234567"):
        FIGURES["check"]()


def test_step_time(tmp_path: Path) -> None:
    rows = bench("step_time.py", tmp_path, *TINY, "--length", 32)["rows"]
    assert [row["contestant"] for row in rows] == ["fconv", "convs2s", "transformer", "weighted_transformer_small"]
    assert all(list(row["milliseconds"]) == ["16", "32"] for row in rows)


@pytest.mark.slow
def test_sequence_risk(data: Path, tmp_path: Path) -> None:
    """The script itself compares with the plain form."""
    sizes = ["--user-dir", ROOT / "user_dir", "--arch", "convs2s_tiny", "--optimizer", "adam"]
    sizes += ["--lr", 0.01, "--batch-size", 16]
    run("train", data, *sizes, "--max-epoch", 1, "--num-workers", 0, "--save-dir", tmp_path)
    options = ["--batches", 1, "--max-tokens", 64, "--hypotheses", 3]
    shown = shown_by("sequence_risk.py", tmp_path / "checkpoint_last.pt", data, *options)
    forms = re.findall(r"^(\S+) +[0-9.]+ s, [0-9.]+ times as long as cross-entropy$", shown, re.MULTILINE)
    assert forms == ["cross-entropy", "sequence_risk", "plain"]


@pytest.mark.slow  # builds models of the papers' sizes
def test_training(tmp_path: Path) -> None:
    options = ["--vocabulary", 50, "--sentences", 2, "--length", 4, "--rounds", 1, "--json", tmp_path / "rows.json"]
    shown = shown_by("training.py", *options)
    assert len(re.findall(r"^\| .+ \| \d+ \| \d+ \| [\d.]+ \|", shown, flags=re.MULTILINE)) == 4
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert missing_in(FIGURES["figures_of"](rows), "an update") == set()


@pytest.mark.slow
def test_newstest(tmp_path: Path) -> None:
    lengths = [1 + 5 * number % 12 for number in range(11)]
    (tmp_path / "text").write_text("".join("a b c d e f g h i j k l"[: 2 * length] + "\n" for length in [*lengths, 1]))
    sizes = ["--layers", 1, "--width", 16, "--transformer-layers", 1, "--vocabulary", 60]
    options = ["--input", tmp_path / "text", "--sentences", len(lengths), "--max-tokens", 24, "--beams", "1,5"]
    rows = bench("newstest.py", tmp_path, *options, *sizes)["rows"]
    names = {row["contestant"] for row in rows}
    assert {"fconv", "convs2s", "transformer", f"convs2s, {FAST}", "convs2s, exported, float32"} < names
    for each in ("whole commands", "exported", "exported, one thread"):
        assert missing_in(FIGURES["figures_of"](rows), each) == set()
    for row in rows:
        assert (row["sentences"], row["tokens"]) == (len(lengths), rows[0]["tokens"])
        assert 0.01 < row["peak GB"] < 2 or row["contestant"].startswith("CTranslate2")
