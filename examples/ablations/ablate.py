#!/usr/bin/env python3
"""Train the models of a paper's ablation tables with several seeds, by ``fairseq-hydra-train --multirun``.

``ablate.py FAMILY OUT --data DATA_BIN [-- hydra override ...]`` writes everything to the folder OUT.  Run the same
command again to resume: it skips finished trainings and resumes a stopped one.  A *cell* is one model of a table.  All
cells are trained with the first seed, then all with the second.  The tables, ``OUT/FAMILY.md``, are updated after each
training, and the pictures after each seed.  Cells without a result are marked as not filled.

Words after ``--`` are hydra overrides for all cells, such as ``hydra/launcher=joblib hydra.launcher.n_jobs=4``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import yaml
from tables import FAMILIES, Family

import fairseq_plugins
from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.figure import new_figure
from fairseq_plugins.cli.plot_loss import read_log
from fairseq_plugins.cli.processes import fairseq_lines, stoppable
from fairseq_plugins.common.files import work_in

sys.path.append(str(Path(__file__).resolve().parents[1]))  # folder of modules that several examples share
from recorded_settings import refuse_other_settings

fairseq_plugins.install()

HERE = Path(__file__).resolve().parent


class Result(NamedTuple):
    """Perplexity of a training's best validation, and its BLEU if ``task.eval_bleu`` is set."""

    perplexity: float
    bleu: float | None


def write_configuration(folder: Path, family: str, width: int) -> None:
    """Write the recipe, and a hydra group with one file per cell; ``width`` replaces the letter W in all files."""

    def write(path: Path, text: str) -> None:
        path.write_text(re.sub(r"\b(\d*)W\b", lambda found: str(int(found[1] or 1) * width), text), encoding="utf-8")

    (folder / "cell").mkdir(parents=True, exist_ok=True)
    write(folder / f"{family}.yaml", (HERE / "config" / f"{family}.yaml").read_text(encoding="utf-8"))
    for name, changes in FAMILIES[family].cells.items():
        write(folder / "cell" / f"{name}.yaml", f"# @package _global_\n{yaml.safe_dump(changes)}")


def train(args: argparse.Namespace, cells: list[str], seed: int) -> Iterator[str]:
    """Train the named models with one seed, and yield fairseq's output lines."""
    every = max(1, args.updates // 10)
    overrides = [
        f"common.user_dir={quoted(HERE.parents[1] / 'user_dir')}",
        f"task.data={quoted(args.data.resolve())}",
        f"optimization.max_update={args.updates}",
        f"dataset.validate_interval_updates={every}",
        f"checkpoint.save_interval_updates={every}",
        "checkpoint.keep_interval_updates=1",
        *args.overrides,
    ]
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    where = [
        f"hydra.sweep.dir={quoted(args.out.resolve() / args.family)}",
        "hydra.sweep.subdir=${hydra.job.override_dirname}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(key for key in keys if '/' not in key)}]",
    ]
    config = ["--config-dir", args.out.resolve() / "config", "--config-name", args.family]
    return fairseq_lines(
        "hydra-train", "--multirun", *config, f"+cell={','.join(cells)}", f"common.seed={seed}", *overrides, *where
    )


def quoted(path: Path) -> str:
    """Quote a path for hydra, whose grammar would read a comma as a list, and refuse letters such as ü."""
    return "'" + str(path).replace("'", "\\'") + "'"


def result(args: argparse.Namespace, cell: str, seed: int) -> Result | None:
    """Return the result of a training, or None if it is not finished.

    Raises:
        ValueError: the training is longer than ``--updates``, and was not validated at that number of updates.
    """
    log = args.out / args.family / f"+cell={cell},common.seed={seed}" / "hydra_train.log"
    lines = [line for line in read_log(log) if "valid_loss" in line] if log.exists() else []
    validated = {int(line["valid_num_updates"]) for line in lines}
    if args.updates not in validated:
        if max(validated, default=0) > args.updates:
            raise ValueError(
                f"--updates {args.updates}: {log} has no validation at this update; use one of "
                f"{', '.join(map(str, sorted(validated)))}"
            )
        return None
    lines = [line for line in lines if int(line["valid_num_updates"]) <= args.updates]
    best = min(lines, key=lambda line: float(line["valid_loss"]))
    return Result(float(best["valid_ppl"]), float(best["valid_bleu"]) if "valid_bleu" in best else None)


def report(args: argparse.Namespace, known: set[tuple[str, int]], pictures: bool = False) -> None:
    """Write the tables and optionally the pictures; print a line for each newly finished training."""
    family: Family = FAMILIES[args.family]
    results = {(cell, seed): result(args, cell, seed) for cell in family.cells for seed in args.seeds}
    finished = {place: found for place, found in results.items() if found is not None}
    for (cell, seed), found in finished.items():
        if (cell, seed) not in known:
            print(f"{cell}, seed {seed}: validation perplexity {found.perplexity:.2f}", flush=True)
    known.update(finished)
    lines = [f"{args.updates} updates, layers of width {args.width}, seeds {', '.join(map(str, args.seeds))}."]
    for number, (title, cells) in enumerate(family.tables.items()):
        lines += ["", f"## {title}", ""]
        lines += ["| | validation perplexity | lowest to highest | BLEU | seeds |", "|---" * 5 + "|"]
        found_by_cell = {
            cell: [finished[cell, seed] for seed in args.seeds if (cell, seed) in finished] for cell in cells
        }
        for cell, found in found_by_cell.items():
            lines.append(f"| {cell} | {' | '.join(columns(found))} | {len(found)} of {len(args.seeds)} |")
        if pictures:
            draw(args.out / f"{args.family}-{number + 1}.png", title, found_by_cell)
    (args.out / f"{args.family}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def columns(found: list[Result]) -> Iterator[str]:
    """Yield the mean and range of the perplexity, and the mean BLEU."""
    perplexities = [each.perplexity for each in found]
    scores = [each.bleu for each in found if each.bleu is not None]
    yield f"{statistics.fmean(perplexities):.2f}" if found else "not filled"
    yield f"{min(perplexities):.2f} to {max(perplexities):.2f}" if len(found) > 1 else ""
    yield f"{statistics.fmean(scores):.1f}" if scores else ""


def draw(output: Path, title: str, found_by_cell: dict[str, list[Result]]) -> None:
    """Draw a row for each cell, with a dot for each seed and a bar at their mean."""
    figure = new_figure(7, 1 + 0.25 * len(found_by_cell))
    axes = figure.add_subplot()
    for row, found in enumerate(found_by_cell.values()):
        perplexities = [each.perplexity for each in found]
        axes.plot(perplexities, [row] * len(found), "o", color="#0072b2", markersize=5)
        if found:
            axes.plot(statistics.fmean(perplexities), row, "|", color="black", markersize=14)
    rows = [cell if found else f"{cell} (not filled)" for cell, found in found_by_cell.items()]
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="validation perplexity", title=title, ylim=(len(rows) - 0.5, -0.5))
    axes.grid(alpha=0.3)
    figure.savefig(output)


def is_named(title: str, words: list[str]) -> bool:
    """Return whether a title contains one of ``words`` as a whole word or number (4 does not match "4.5")."""
    return not set(words).isdisjoint(re.findall(r"\d[\d.]*\d|\w+", title))


def main() -> None:
    own, overrides = sys.argv[1:], []
    if "--" in own:
        own, overrides = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES, help="family of the models to train")
    parser.add_argument("out", type=Path, help="folder for all results")
    parser.add_argument("--data", type=Path, required=True, help="output of fairseq-preprocess --joined-dictionary")
    parser.add_argument(
        "--tables",
        nargs="+",
        metavar="WORD",
        help="train only the models of tables whose titles contain one of these words or numbers, such as 5, 4.5, "
        "heads or depth (default: the models of all tables)",
    )
    parser.add_argument("--updates", type=positive, default=2000, help="updates per training (default: %(default)s)")
    parser.add_argument(
        "--width", type=positive, default=128, help="width of the layers, 512 in the papers (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="random seeds (default: 1 2)")
    args = parser.parse_args(own)
    args.overrides = overrides
    if not args.data.is_dir():
        parser.error(f"--data: {args.data} is not a folder; run fairseq-preprocess first")
    tables = FAMILIES[args.family].tables
    wanted = [title for title in tables if not args.tables or is_named(title, args.tables)]
    cells = list(dict.fromkeys(cell for title in wanted for cell in tables[title]))
    if not cells:
        parser.error(
            f"--tables {' '.join(args.tables)}: no table has such a word in its title; use words of the titles "
            f"{', '.join(map(repr, tables))}"
        )

    try:
        with stoppable(), work_in(args.out):
            fill(args, cells)
    except ValueError as error:
        sys.exit(f"{error}")


def fill(args: argparse.Namespace, cells: list[str]) -> None:
    """Train all given models that have no result yet, and update the tables and pictures.

    Raises:
        ValueError: a training fails, or OUT contains trainings with other data, width or overrides.
    """
    # Overrides that begin with "hydra" only choose the launcher, so they may differ between calls.
    overrides = shlex.join(word for word in args.overrides if not word.startswith("hydra"))
    shared = {"data": args.data.resolve(), "width": args.width, "overrides": overrides}
    validated = (log for log in (args.out / args.family).glob("*/hydra_train.log") if "valid_loss" in log.read_text())
    made = chain(validated, (args.out / args.family).glob("*/checkpoints/*.pt"))
    refuse_other_settings(args.out / f"{args.family}.json", shared, made)
    write_configuration(args.out / "config", args.family, args.width)
    known: set[tuple[str, int]] = set()
    report(args, known)
    for seed in args.seeds:
        left = [cell for cell in cells if (cell, seed) not in known]
        for line in train(args, left, seed) if left else ():
            if "done training" in line:
                report(args, known)
        report(args, known, pictures=True)
    print(args.out / f"{args.family}.md")


if __name__ == "__main__":
    main()
