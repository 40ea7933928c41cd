"""``fairseq-plugins plot-loss``: how the losses of trainings fall, out of fairseq's logs (``--log-format json``).

On the left validation loss and, paler, training loss over the updates; on the right the one over the other (Ahmed et
al. 2017, figure 2).  Logs of one setting with several seeds are one line, their mean, within a band from the lowest to
the highest.
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

from fairseq_plugins.cli.files import refuse_input_as_output, refuse_unreadable
from fairseq_plugins.cli.plots.figure import add_picture, line_styles, new_figure, save

LOG = "train.log"  # beside the checkpoints of own-data
LARGEST = 1e30  # loss; with larger ones, means and axes overflow


class Point(NamedTuple):
    """What a validation has found, in bits per token as fairseq logs it, and the training since the one before."""

    updates: int
    validation: float
    training: float  # nan where the log does not say


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="*",
        type=Path,
        metavar="LOG",
        help="log of a training, which gets its own line; or own-data's folder, for those of all its trainings",
    )
    parser.add_argument(
        "--run",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "LOG"),
        help="logs of one setting with several seeds, which get one line and a band; may be given again",
        dest="runs",
    )
    add_picture(parser, default="loss.png")


def run(args: Namespace) -> None:
    """Draw the curves, and print the best validation of each run.

    Raises:
        ValueError: there is no log, one has no validation, those of a run have none in common, or matplotlib is not
            installed.
        OSError: a log cannot be read.
    """
    of_runs = [Path(log) for _, *logs in args.runs for log in logs]
    refuse_unreadable(*of_runs, *(path for path in args.logs if not path.is_dir()))
    refuse_input_as_output(args.output, [*args.logs, *of_runs])
    runs: dict[str, list[list[Point]]] = {}
    for path in args.logs:
        runs |= curves_in(path) if path.is_dir() else {str(path): [read_curve(path)]}
    for name, *logs in args.runs:
        if not logs:
            raise ValueError(f"--run {name}: give the run's logs behind its name")
        if name in runs:
            raise ValueError(f"--run {name}: another run has that name")
        runs[name] = [read_curve(Path(log)) for log in logs]
    if not runs:
        raise ValueError("there is no log to draw: give LOG ... or --run NAME LOG ...")
    draw(runs, args.output)
    for name, curves in runs.items():
        best = [min(curve, key=lambda point: (math.isnan(point.validation), point.validation)) for curve in curves]
        print(f"{name}: " + ", ".join(f"{point.validation:.3f} at update {point.updates}" for point in best))
    print(args.output)


def curves_in(folder: Path) -> dict[str, list[list[Point]]]:
    """Those of the trainings that ``own-data`` has left in its folder or in the folder of one model, by their logs.

    Raises:
        ValueError: there is no log, or none with a validation.
    """
    logs = sorted([*folder.glob(LOG), *folder.glob(f"*/{LOG}")])
    found = {}
    for log in logs:
        try:
            found[str(log)] = [read_curve(log)]
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
    if not found:
        reason = "was validated yet" if logs else f"is there; its log would be called {LOG}"
        raise ValueError(f"{folder}: no training of own-data {reason}")
    return found


def read_log(log: Path) -> list[dict[str, Any]]:
    """What fairseq-train or fairseq-hydra-train has written with ``--log-format json``, line by line.

    Raises:
        OSError: the log cannot be read.
    """
    return records(log.read_text(encoding="utf-8", errors="replace"))


def records(text: str) -> list[dict[str, Any]]:
    """Return the records of a log's lines, without lines that two processes have written into each other."""
    found = []
    for line in text.split("\n"):
        start = line.find('{"epoch"')
        if start >= 0 and line.endswith("}"):
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line[start:]))
    return found


def read_curve(log: Path) -> list[Point]:
    """The validations in a log, of which the later ones count where a training was resumed.

    With ``--log-file`` fairseq writes each line once more with every epoch; it counts once.

    Raises:
        ValueError: there is none.
        OSError: the log cannot be read.
    """
    training: dict[int, float] = {}  # losses by the number of updates
    curve: dict[int, Point] = {}
    lines = [numbers(line) for line in read_log(log)]
    names = (name.removesuffix("_num_updates") for line in lines for name in line if name.endswith("_num_updates"))
    parts = [name for name in names if name != "train"]  # of --valid-subset
    part = "valid" if "valid" in parts or not parts else parts[0]
    for line in lines:
        if {f"{part}_loss", f"{part}_num_updates"} <= line.keys():
            updates = int(line[f"{part}_num_updates"])
            before = curve[updates].training if updates in curve else math.nan
            mean = statistics.fmean(training.values()) if training else before
            curve[updates] = Point(updates, line[f"{part}_loss"], mean)
            training = {}
        elif {"train_loss", "train_num_updates"} <= line.keys():
            # Of an epoch, behind its validation; for logs in which nothing else is.
            last = curve.get(int(line["train_num_updates"]))
            if last is not None and math.isnan(last.training):
                curve[last.updates] = last._replace(training=line["train_loss"])
        elif {"loss", "num_updates"} <= line.keys():
            training[int(line["num_updates"])] = line["loss"]
    if not curve:
        raise ValueError(f"{log}: no validation there; fairseq-train writes them with --log-format json")
    return [curve[updates] for updates in sorted(curve)]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line, nan for losses that are too large; numbers of updates are whole."""
    found: dict[str, float] = {}
    for name, value in line.items():
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
            found[name] = int(number) if name.endswith("num_updates") else number if abs(number) < LARGEST else math.nan
    return found


def draw(runs: Mapping[str, Sequence[Sequence[Point]]], output: Path) -> None:
    """Both pictures, of the curves of each run's seeds.

    Raises:
        ValueError: the seeds of a run were never validated after equally many updates, or no loss is a number.
    """
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    labels = []
    settled: list[Point] = []  # behind the first fifth, in which losses fall too far to show
    for number, (name, curves) in enumerate(runs.items()):
        style = line_styles(number)
        labels.append(name if len(curves) == 1 else f"{name}, {len(curves)} seeds")
        common = sorted(set.intersection(*({point.updates for point in curve} for curve in curves)))
        if not common:
            raise ValueError(f"{name}: there is no update at which all of its trainings were validated")
        by_update = [[point for curve in curves for point in curve if point.updates == updates] for updates in common]
        for kind, more in (("validation", {"label": str(number)}), ("training", {"alpha": 0.4, "linewidth": 1})):
            values = [[getattr(point, kind) for point in points] for points in by_update]
            marker = {"marker": "."} if len(common) < 20 else {}  # a single point has no line
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
        raise ValueError("no loss is a number: the trainings have diverged")
    limits = (min(losses) - 0.05, max(losses) + 0.05)
    left.set(xlabel="updates", ylabel="validation loss (pale: training)", ylim=limits)
    right.set(xlabel="training loss", ylabel="validation loss", xlim=limits)
    left.locator_params(axis="x", nbins=6)  # numbers of five digits need room
    for text, label in zip(left.legend(fontsize="small").get_texts(), labels, strict=True):
        drawable = label.encode(errors="replace").decode()  # without the bytes of a name that are not UTF-8
        text.set(text=drawable, parse_math=False)  # set here, a name may begin with _ and hold $
    for panel in (left, right):
        panel.grid(alpha=0.3)
    save(figure, output)
