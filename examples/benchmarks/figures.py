#!/usr/bin/env python3
"""Measure the ratios of README.md and docs/performance.md on this machine, and compare them with earlier ones.

The script runs generation.py, training.py and newstest.py one after the other, and writes tables for this kind of
machine to ``figures/``.  The script then lists the ratios that differ by more than a tenth from the previous table of
this kind of machine.  Start the script on an idle machine.

``--check`` measures nothing, and fails if the code has changed since all tables in ``figures/`` were measured; the
release workflow runs ``--check``.
"""

from __future__ import annotations

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
TABLES = HERE / "figures"
# Seconds in each round, and peak memory in GB if measured, by run and contestant.
Results = dict[str, dict[str, tuple[list[float], "float | None"]]]
MOVED = 0.1  # ratios that change by more are listed; smaller changes occur even between two runs on the same machine
MEASURED = ("fairseq_plugins", "examples/benchmarks", ":!examples/benchmarks/figures", ":!*.md")

# Script and options of each run.  All runs together take about 25 minutes on two cores.
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
    """Yield three names for each ratio of speeds: the run, the slower contestant, and the faster contestant."""
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
    """Return a line for each ratio that changed by more than a tenth, is new, or was not measured now."""
    lines = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            lines.append(f"{name}: {'new' if old is None else 'not measured'}")
        elif abs(new / old - 1) > MOVED:
            lines.append(f"{name}: {old:.2f} before, {new:.2f} now")
    return lines


def measure(run: str, folder: Path, text: Path) -> dict[str, Any]:
    """Run a script, and return the contents of its ``--json`` file."""
    script, *options = RUNS[run]
    if script == "newstest.py":
        options += ["--input", str(text)]
    path = folder / "figures.json"
    subprocess.run([sys.executable, "-W", "ignore", HERE / script, *options, "--json", path], check=True)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def newstest(folder: Path) -> Path:
    """Return the path of the English side of newstest2014, which sacrebleu downloads once."""
    text = folder / "test.en"
    command = [sys.executable, "-m", "sacrebleu", "-t", "wmt14", "-l", "en-de", "--echo", "src"]
    text.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return text


def git(*words: str) -> str | None:
    """Return the output of a git command in this repository, or None if the command fails."""
    command = ["git", "-C", str(HERE.parent.parent), *words]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    return None if finished.returncode else finished.stdout.strip()


def check() -> None:
    """Exit with an error unless a table was measured with the code of this commit."""
    for path in sorted(TABLES.glob("*.txt")):
        commit = path.read_text(encoding="utf-8").partition("\n")[0].rpartition("commit ")[2]
        if git("diff", "--quiet", commit, "--", *MEASURED) is not None:
            print(f"{path.name}: measured at commit {commit}, and the code has not changed since")
            return
    sys.exit(f"{TABLES}: the code has changed since its tables were measured; run make figures, and commit the table")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="file with the English side of newstest2014, to use instead of a download",
    )
    parser.add_argument("--check", action="store_true", help="only check that the tables belong to the present code")
    args = parser.parse_args()
    if args.check:
        check()
        return
    if git("diff", "--quiet", "HEAD", "--", *MEASURED) is None:
        sys.exit("the code has uncommitted changes, so the tables could not name a commit; commit the changes first")
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
    ratios = read_ratios(path.read_text(encoding="utf-8"))
    print("\n".join(moved(before, ratios) if before else ["no earlier figures exist for this kind of machine"]))
    missing = [name for name, ratio in {**speeds_of(results), **memories_of(results)}.items() if ratio is None]
    print("\n".join(["", *(f"{name}: not measured on this machine" for name in missing)]))


if __name__ == "__main__":
    main()
