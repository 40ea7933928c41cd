#!/usr/bin/env python3
"""Measure every ratio of README.md and docs/performance.md on this machine, and compare the ratios with earlier ones.

The script runs generation.py, training.py and newstest.py one after the other, and writes a table for this kind of
machine to ``figures/``.  The script then lists the ratios that differ by more than a tenth from the previous table of
this kind of machine.  Start the script on an idle machine.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MOVED = 0.1  # ratios that change by more are listed; smaller changes occur even between two runs on the same machine

# Script and options of each run.  All runs together take about 20 minutes on two cores.
RUNS: dict[str, list[str]] = {
    "16 sentences": ["generation.py", "--rounds", "5"],
    "one sentence": ["generation.py", "--sentences", "1", "--rounds", "7"],
    "an update": ["training.py", "--sentences", "32", "--rounds", "5"],
    "whole commands": ["newstest.py", "--sentences", "150", "--rounds", "1"],
}
CONVS2S, WEIGHTED = "convs2s, translation_fast", "weighted_transformer_small, translation_fast"
EXPORTED = "weighted_transformer_small, exported"
TRAINED = (
    "fconv_iwslt_de_en",
    "fconv_wmt_en_ro (20+20 layers of 512)",
    "transformer (6+6 layers of 512/2048)",
    "lstm (bidirectional, 512 units) and conv_encoder_bilstm",
)


def comparisons() -> Iterator[tuple[str, str, str]]:
    """Yield three names for each ratio of speeds: the run, the other program's model, and our model."""
    for run in ("16 sentences", "one sentence"):
        for precision in ("float32", "bfloat16", "int8"):
            yield run, "fconv, as shipped", f"{CONVS2S}, {precision}"
            yield run, "transformer", f"{WEIGHTED}, {precision}"
        yield run, "fconv, weights cached", f"{CONVS2S}, float32"
        for precision in ("float32", "int8"):
            for ours in (CONVS2S, WEIGHTED):
                yield run, f"CTranslate2, {precision}", f"{ours}, {precision}"
    for model in TRAINED:
        for precision in ("float32", "bfloat16"):
            yield "an update", f"{model}, fairseq", f"{model}, {precision}"
    for beam in (1, 5):
        for precision in ("float32", "int8"):
            for theirs, ours in (("fconv", CONVS2S), ("transformer", WEIGHTED)):
                yield "whole commands", f"{theirs}, beam {beam}", f"{ours}, {precision}, beam {beam}"
            theirs = f"CTranslate2, {precision}, beam {beam}"
            yield "whole commands", theirs, f"{EXPORTED}, {precision}, beam {beam}"


def seconds_of(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of each contestant from a script's ``--json`` file."""
    found = {}
    for row in rows:
        if isinstance(row["seconds"], dict):
            found |= {f"{row['model']}, {side}": seconds for side, seconds in row["seconds"].items()}
        else:
            beam = f", beam {row['beam']}" if "beam" in row else ""
            found[row["contestant"] + beam] = row["seconds"]
    return found


def ratios_of(results: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return our speed relative to the other contestant's; leave out comparisons with an unmeasured contestant."""
    ratios = {}
    for run, theirs, ours in comparisons():
        seconds = results[run]
        if theirs in seconds and ours in seconds:
            turns = zip(seconds[theirs], seconds[ours], strict=True)
            ratios[f"{run}: {ours}, versus {theirs}"] = statistics.median(their / our for their, our in turns)
    return ratios


def read_ratios(text: str) -> dict[str, float]:
    """Parse the text of a file that `table` formatted, and return its ratios by name."""
    return {name: float(ratio) for name, ratio in re.findall(r"^\| (.+) \| ([0-9.]+) \|$", text, flags=re.MULTILINE)}


def table(heading: str, ratios: dict[str, float]) -> str:
    """Format the ratios of one kind of machine as a text with a heading and a table."""
    rows = "".join(f"| {name} | {ratio:.2f} |\n" for name, ratio in ratios.items())
    return f"{heading}\n\n| | times as fast |\n|---|---|\n{rows}"


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


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="file with the English side of newstest2014, to use instead of a download",
    )
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        text = args.input or newstest(Path(name))
        found = {run: measure(run, Path(name), text) for run in RUNS}
    machine = found["16 sentences"]["machine"]
    kind = f"{machine['processor']}, {found['16 sentences']['options']['threads']} threads"
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    heading = f"{kind}; torch {machine['torch']}; {time.strftime('%Y-%m-%d')}; commit {commit}"
    ratios = ratios_of({run: seconds_of(each["rows"]) for run, each in found.items()})
    path = HERE / "figures" / f"{re.sub('[^a-z0-9]+', '-', kind.lower())}.txt"
    before = read_ratios(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(table(heading, ratios), encoding="utf-8")
    print(f"\n{path}, {(time.monotonic() - began) / 60:.0f} minutes")
    print("\n".join(moved(before, ratios) if before else ["no earlier figures exist for this kind of machine"]))


if __name__ == "__main__":
    main()
