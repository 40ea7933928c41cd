"""Draw the losses in fairseq's logs (--log-format json).

The left panel shows validation loss and, in a paler colour, training loss over the updates.  The right panel plots
validation loss against training loss (Ahmed et al. 2017, figure 2).  Trainings of one setting with several seeds are
drawn as one line, their mean loss, with a band from the lowest to the highest loss.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_plugins.cli.figure import add_picture, line_styles, new_figure, save
from fairseq_plugins.common.files import refuse_input_as_output

LOG = "train.log"  # own-data's log, beside its checkpoints
LARGEST = 1e30  # largest loss; larger values would overflow means and axes


class Point(NamedTuple):
    """A validation loss, and the mean training loss since the previous validation, both in bits per token."""

    updates: int
    validation: float
    training: float  # nan if the log has no training loss


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="*",
        type=Path,
        metavar="LOG",
        help="log of a training, drawn as one line; own-data's folder stands for the logs of all its trainings",
    )
    parser.add_argument(
        "--run",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "LOG"),
        help="NAME of a setting, and LOGs of its trainings with different seeds; these logs are drawn as one line with "
        "a band; the option may be repeated",
        dest="runs",
    )
    add_picture(parser, default="loss.png")


def run(args: Namespace) -> None:
    """Draw the curves, and print the best validation of each run."""
    of_runs = [Path(log) for _, *logs in args.runs for log in logs]
    refuse_input_as_output(args.output, [*args.logs, *of_runs])
    runs: dict[str, list[list[Point]]] = {}
    for path in args.logs:
        runs |= curves_in(path) if path.is_dir() else {str(path): [read_curve(path)]}
    for name, *logs in args.runs:
        if not logs:
            raise ValueError(f"--run {name}: no logs; give the run's logs after its name")
        if name in runs:
            raise ValueError(f"--run {name}: name used twice; rename one run")
        runs[name] = [read_curve(Path(log)) for log in logs]
    if not runs:
        raise ValueError("LOG: no log to draw; give LOG ... or --run NAME LOG ...")
    draw(runs, args.output)
    for name, curves in runs.items():
        best = [min(curve, key=lambda point: (math.isnan(point.validation), point.validation)) for curve in curves]
        print(f"{name}: " + ", ".join(f"{point.validation:.3f} at update {point.updates}" for point in best))
    print(args.output)


def curves_in(folder: Path) -> dict[str, list[list[Point]]]:
    """Return the curves in a folder that own-data created, or in one model's subfolder; keys are the logs' paths."""
    logs = sorted([*folder.glob(LOG), *folder.glob(f"*/{LOG}")])
    found = {}
    for log in logs:
        try:
            found[str(log)] = [read_curve(log)]
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
    if not found:
        problem = "no validation yet; draw the losses later" if logs else f"no {LOG} found; give own-data's folder"
        raise ValueError(f"{folder}: {problem}")
    return found


def read_log(log: Path) -> list[dict[str, Any]]:
    """Parse a log of fairseq-train or fairseq-hydra-train (``--log-format json``)."""
    return records(log.read_text(encoding="utf-8", errors="replace"))


def records(text: str) -> list[dict[str, Any]]:
    """Parse the JSON lines of a log; skip lines in which the output of two processes is mixed."""
    found = []
    for line in text.split("\n"):
        start = line.find('{"epoch"')
        if start >= 0 and line.endswith("}"):
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line[start:]))
    return found


def read_curve(log: Path) -> list[Point]:
    """Return the validations in a log; if a resumed training repeats a validation, the later result counts.

    With ``--log-file``, fairseq writes each line of a run's second epoch twice, each line of the third epoch three
    times, and so on.  Repeated lines count once.
    """
    training: dict[int, float] = {}  # losses, by number of updates
    curve: dict[int, Point] = {}
    lines = [numbers(line) for line in read_log(log)]
    names = (name.removesuffix("_num_updates") for line in lines for name in line if name.endswith("_num_updates"))
    parts = [name for name in names if name != "train"]  # names of the parts in --valid-subset
    part = "valid" if "valid" in parts or not parts else parts[0]
    for line in lines:
        if {f"{part}_loss", f"{part}_num_updates"} <= line.keys():
            updates = int(line[f"{part}_num_updates"])
            before = curve[updates].training if updates in curve else math.nan
            mean = statistics.fmean(training.values()) if training else before
            curve[updates] = Point(updates, line[f"{part}_loss"], mean)
            training = {}
        elif {"train_loss", "train_num_updates"} <= line.keys():
            # fairseq logs the epoch's mean training loss after the epoch's validation. The mean is used if the log has
            # no other training losses.
            last = curve.get(int(line["train_num_updates"]))
            if last is not None and math.isnan(last.training):
                curve[last.updates] = last._replace(training=line["train_loss"])
        elif {"loss", "num_updates"} <= line.keys():
            training[int(line["num_updates"])] = line["loss"]
    if not curve:
        raise ValueError(f"{log}: no validation found; train with --log-format json")
    return [curve[updates] for updates in sorted(curve)]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line; losses above `LARGEST` become nan, and numbers of updates are integers."""
    found: dict[str, float] = {}
    for name, value in line.items():
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
            found[name] = int(number) if name.endswith("num_updates") else number if abs(number) < LARGEST else math.nan
    return found


def draw(runs: Mapping[str, Sequence[Sequence[Point]]], output: Path) -> None:
    """Draw both panels."""
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    # The axes' limits ignore the first fifth of the updates, whose high losses would squeeze the rest of the curve.
    settled: list[Point] = []
    for number, (name, curves) in enumerate(runs.items()):
        style = line_styles(number)
        label = name if len(curves) == 1 else f"{name}, {len(curves)} seeds"
        label = label.encode(errors="replace").decode()  # a file's name need not be UTF-8
        # matplotlib skips labels that begin with _, and reads text between two $ as mathematics.
        label = label.lstrip("_").replace("$", r"\$")
        common = sorted(set.intersection(*({point.updates for point in curve} for curve in curves)))
        if not common:
            raise ValueError(f"{name}: the logs validate after different numbers of updates; give logs of one setting")
        by_update = [[point for curve in curves for point in curve if point.updates == updates] for updates in common]
        for kind, more in (("validation", {"label": label}), ("training", {"alpha": 0.4, "linewidth": 1})):
            values = [[getattr(point, kind) for point in points] for points in by_update]
            # Lines of few points get markers, because a line of a single point would be invisible.
            marker = {"marker": "."} if len(common) < 20 else {}
            left.plot(common, [statistics.fmean(each) for each in values], **{**style, **more, **marker})
            if kind == "validation" and len(curves) > 1:
                band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
                left.fill_between(common, [min(each) for each in values], [max(each) for each in values], **band)
        for curve in curves:
            training, validation = ([getattr(point, kind) for point in curve] for kind in ("training", "validation"))
            right.plot(training, validation, ".", color=style["color"], markersize=4)
            settled += [point for point in curve if point.updates >= curve[-1].updates / 5]
    losses = [loss for _, *both in settled for loss in both if math.isfinite(loss)]
    if not losses:
        raise ValueError("LOG: no finite loss, because the trainings diverged; give other logs")
    limits = (min(losses) - 0.05, max(losses) + 0.05)
    left.set(xlabel="updates", ylabel="validation loss (pale: training)", ylim=limits)
    right.set(xlabel="training loss", ylabel="validation loss", xlim=limits)
    left.locator_params(axis="x", nbins=6)  # fewer ticks, because five-digit labels need room
    left.legend(fontsize="small")
    for panel in (left, right):
        panel.grid(alpha=0.3)
    save(figure, output)
