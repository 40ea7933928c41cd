#!/usr/bin/env python3
"""Measure the ratios of README.md and docs/performance.md on this machine, and compare them with earlier ones.

The script runs generation.py, training.py and newstest.py one after the other, and writes tables for this kind of
machine to ``figures/``.  The script then lists the ratios that differ by more than a tenth from the previous table of
this kind of machine.  Start the script on an idle machine.

``--check`` measures nothing.  It fails if the code has changed since the table of the pages' machine was measured;
comments and docstrings may change.  The release workflow runs ``--check``.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TABLES = HERE / "figures"
PAGES = TABLES / "amd-epyc-family-25-model-17-2-threads.txt"  # the machine of the tables on the pages
# Seconds in each round, and peak memory in GB if measured, by run and contestant.
Results = dict[str, dict[str, tuple[list[float], "float | None"]]]
MOVED = 0.1  # ratios that change by more are listed; smaller changes occur even between two runs on the same machine
# The measured code, as arguments of git.  This script is not part of it: after a change of `RUNS`, measure again.
_BENCHMARKS = "examples/benchmarks"
CODE = ("--", "fairseq_plugins", _BENCHMARKS, f":!{_BENCHMARKS}/figures", f":!{_BENCHMARKS}/figures.py", ":!*.md")

# Script and options of each run.  All runs together take 25 to 40 minutes on two cores.
_TEXT = ("newstest.py", "--sentences", "150", "--rounds")
RUNS: dict[str, tuple[str, ...]] = {
    "16 sentences": ("generation.py", "--rounds", "5"),
    "one sentence": ("generation.py", "--sentences", "1", "--rounds", "7"),
    "an update": ("training.py", "--sentences", "32", "--rounds", "5"),
    "whole commands": (*_TEXT, "1"),
    "exported": (*_TEXT, "3", "--only", "exported,CTranslate2"),
    "exported, one thread": (*_TEXT, "2", "--only", "exported,CTranslate2", "--threads", "1"),
}
EXPORTED_RUNS = ("exported", "exported, one thread")
PRECISIONS, EXPORTED, BEAMS = ("float32", "bfloat16", "int8"), ("float32", "int8"), (1, 5)
FAST = "translation_fast"
OURS = CONVS2S, WEIGHTED = "convs2s", "weighted_transformer_small"
TRAINED = (
    "fconv_iwslt_de_en",
    "fconv_wmt_en_ro (20+20 layers of 512)",
    "transformer (6+6 layers of 512/2048)",
    "lstm (bidirectional, 512 units) and conv_encoder_bilstm",
)


def comparisons() -> Iterator[tuple[str, str, str]]:
    """Yield the run and two contestants for each ratio: the second contestant's speed relative to the first's."""
    yield from in_generation()
    for model in TRAINED:
        for precision in ("float32", "bfloat16"):
            yield "an update", f"{model}, fairseq", f"{model}, {precision}"
        yield "an update", f"{model}, float32", f"{model}, bfloat16"
    for beam, precision in product(BEAMS, EXPORTED):
        for theirs, ours in (("fconv", CONVS2S), ("transformer", WEIGHTED)):
            yield "whole commands", f"{theirs}, beam {beam}", f"{ours}, {FAST}, {precision}, beam {beam}"
    for ours in OURS:
        yield "whole commands", f"{ours}, {FAST}, float32, beam 5", f"{ours}, {FAST}, float32, beam 1"
    for run, beam, theirs, ours in versus_ctranslate2():
        yield run, f"{theirs}, beam {beam}", f"{ours}, beam {beam}"
    for run, ours in product(EXPORTED_RUNS, OURS):
        for beam in BEAMS:
            yield run, f"{ours}, exported, float32, beam {beam}", f"{ours}, exported, int8, beam {beam}"
        for precision in EXPORTED:
            yield run, f"{ours}, exported, {precision}, beam 5", f"{ours}, exported, {precision}, beam 1"


def in_generation() -> Iterator[tuple[str, str, str]]:
    """Yield the comparisons of generation.py."""
    for run in ("16 sentences", "one sentence"):
        for theirs, ours in (("fconv, as shipped", CONVS2S), ("transformer", WEIGHTED)):
            yield run, theirs, ours
            for precision in PRECISIONS:
                yield run, theirs, f"{ours}, {FAST}, {precision}"
            for precision in PRECISIONS[1:]:
                yield run, f"{ours}, {FAST}, float32", f"{ours}, {FAST}, {precision}"
            for precision in EXPORTED:
                yield run, f"CTranslate2, {precision}", f"{ours}, {FAST}, {precision}"
        yield run, "fconv, weights cached", f"{CONVS2S}, {FAST}, float32"
        for model in ("fconv, as shipped", "fconv, weights cached", "transformer", *OURS):
            yield run, model, f"{model}, {FAST}, float32"


def versus_ctranslate2() -> Iterator[tuple[str, int, str, str]]:
    """Yield the comparisons of exported models with CTranslate2: run, beam size, CTranslate2, and our model."""
    for run, beam, precision in product(EXPORTED_RUNS, BEAMS, EXPORTED):
        yield run, beam, f"CTranslate2, {precision}", f"{WEIGHTED}, exported, {precision}"


def figures_of(rows: list[dict[str, Any]]) -> dict[str, tuple[list[float], float | None]]:
    """Return seconds in each round, and peak memory in GB if measured, for each contestant of a ``--json`` file."""
    found: dict[str, tuple[list[float], float | None]] = {}
    for row in rows:
        if isinstance(row["seconds"], dict):
            found |= {f"{row['model']}, {side}": (seconds, None) for side, seconds in row["seconds"].items()}
        else:
            beam = f", beam {row['beam']}" if "beam" in row else ""
            found[row["contestant"] + beam] = (row["seconds"], row.get("peak GB"))
    return found


def speeds_of(results: Results) -> dict[str, float | None]:
    """Return the relative speed of each comparison by name, or None if a contestant was not measured."""
    ratios: dict[str, float | None] = {}
    for run, theirs, ours in comparisons():
        turns: list[float] = []
        if {theirs, ours} <= {*results[run]}:
            pairs = zip(results[run][theirs][0], results[run][ours][0], strict=True)
            turns = [their / our for their, our in pairs]
        ratios[f"{run}: {ours}, versus {theirs}"] = statistics.median(turns) if turns else None
    return ratios


def memories_of(results: Results) -> dict[str, float | None]:
    """Return the relative peak memory of exported models by name, or None if a contestant was not measured."""
    ratios: dict[str, float | None] = {}
    for run, beam, theirs, ours in versus_ctranslate2():
        other, own = (results[run].get(f"{name}, beam {beam}", ([], None))[1] for name in (theirs, ours))
        ratios[f"{run}: memory of {ours}, beam {beam}, versus {theirs}"] = own / other if own and other else None
    return ratios


def read_ratios(text: str) -> dict[str, float]:
    """Parse the text of a file that `render` formatted, and return its ratios by name."""
    found = re.findall(r"^\| ([^|]+) \| ([0-9.]+) \|$", text, flags=re.MULTILINE)
    return {name: float(ratio) for name, ratio in found}


def render(heading: str, results: Results) -> str:
    """Format the ratios, seconds and peak memories of one machine as a text with a heading and three tables."""
    lines = [heading]
    for title, ratios in (("times as fast", speeds_of(results)), ("times the memory", memories_of(results))):
        lines += ["", f"| | {title} |", "|---|---|"]
        lines += [f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items() if ratio is not None]
    lines += ["", "| | seconds | peak GB |", "|---|---|---|"]
    for run, contestants in results.items():
        for name, (seconds, peak) in contestants.items():
            lines.append(
                f"| {run}: {name} | {statistics.median(seconds):.3f} | {'' if peak is None else f'{peak:.2f}'} |"
            )
    return "\n".join(lines) + "\n"


def moved(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return a line for each ratio that changed by more than a tenth."""
    both = [name for name in before if name in now]
    return [
        f"{name}: {before[name]:.2f} before, {now[name]:.2f} now" for name in both if differs(before[name], now[name])
    ]


def differs(before: float, now: float) -> bool:
    """Return whether a ratio has changed by more than a tenth."""
    return abs(now / before - 1) > MOVED


def measure(run: str, folder: Path, text: Path) -> dict[str, Any]:
    """Run a script, and return the contents of its ``--json`` file."""
    script, *options = RUNS[run]
    if script == "newstest.py":
        options += ["--input", str(text)]
    path = folder / "figures.json"
    command = [sys.executable, "-W", "ignore", str(HERE / script), *options, "--json", str(path)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{' '.join(command)} failed; no table was written")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def newstest(folder: Path) -> Path:
    """Return the path of the English side of newstest2014, which sacrebleu downloads once."""
    text = folder / "test.en"
    command = [sys.executable, "-m", "sacrebleu", "-t", "wmt14", "-l", "en-de", "--echo", "src"]
    text.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return text


def git(*words: str) -> str:
    """Return the output of a git command in this repository; a failure ends the script."""
    finished = subprocess.run(["git", "-C", ROOT, *words], check=False, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"git {' '.join(words)} failed: {finished.stderr.strip()}")
    return finished.stdout.strip()


def has_other_code(commit: str, name: str) -> bool:
    """Return whether a file differs from the commit's in more than comments and docstrings of Python."""
    now = ROOT / name
    if not (name.endswith(".py") and now.is_file() and git("ls-tree", commit, name)):
        return True
    shown = subprocess.run(["git", "-C", ROOT, "show", f"{commit}:{name}"], check=True, stdout=subprocess.PIPE)
    before, after = ast.parse(shown.stdout), ast.parse(now.read_bytes())
    for node in (*ast.walk(before), *ast.walk(after)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(before) != ast.dump(after)


def check() -> None:
    """Exit with an error unless the table of the pages' machine was measured with the code of this commit."""
    commit = PAGES.read_text(encoding="utf-8").partition("\n")[0].rpartition("commit ")[2]
    changed = [name for name in git("diff", "--name-only", commit, *CODE).splitlines() if has_other_code(commit, name)]
    if changed:
        sys.exit(
            f"{PAGES.name}: {len(changed)} files have changed since commit {commit}, which was measured, for example "
            f"{changed[0]}; run make figures on this kind of machine, and commit the table"
        )
    print(f"{PAGES.name} was measured with this code")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="file with the English side of newstest2014, to use instead of a download",
    )
    parser.add_argument("--check", action="store_true", help="only check that the table of the pages is up to date")
    args = parser.parse_args()
    if args.check:
        check()
        return
    if changed := git("status", "--porcelain", *CODE):
        sys.exit(f"uncommitted changes, so that the table could not name a commit; commit them first:\n{changed}")
    commit = git("rev-parse", "--short", "HEAD")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        text = args.input or newstest(Path(name))
        found = {run: measure(run, Path(name), text) for run in RUNS}
    machine = found["16 sentences"]["machine"]
    kind = f"{machine['processor']}, {found['16 sentences']['options']['threads']} threads"
    heading = f"{kind}; torch {machine['torch']}; {time.strftime('%Y-%m-%d')}; commit {commit}"
    results = {run: figures_of(each["rows"]) for run, each in found.items()}
    path = TABLES / f"{re.sub('[^a-z0-9]+', '-', kind.lower())}.txt"
    before = read_ratios(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(render(heading, results), encoding="utf-8")
    print(f"\n{path}, {(time.monotonic() - began) / 60:.0f} minutes")
    ratios = {**speeds_of(results), **memories_of(results)}
    lines = moved(before, {name: ratio for name, ratio in ratios.items() if ratio is not None})
    lines += [f"{name}: not measured on this machine" for name, ratio in ratios.items() if ratio is None]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
