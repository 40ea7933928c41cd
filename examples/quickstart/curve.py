#!/usr/bin/env python3
"""Draw the training curve of the demo: ``curve.py LOG examples/quickstart/demo_training.png``.

LOG is the output of ``run.sh --log-format json --validate-interval-updates 50``.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from fairseq_plugins.cli.figure import new_figure, save
from fairseq_plugins.cli.plot_loss import read_log

GREY, BLUE = "#999999", "#0072b2"
# Each entry describes a curve: the log's keys of the loss and of the update number, the curve's label, and its style.
LINES = [
    ("loss", "num_updates", "training", {"color": GREY, "linewidth": 1}),
    ("valid_loss", "valid_num_updates", "validation", {"color": BLUE, "linewidth": 2}),
]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, metavar="LOG", help="log of the training")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="file to write")
    args = parser.parse_args()
    if not args.log.is_file():
        parser.error(f"LOG: {args.log} is not a file")
    entries = read_log(args.log)
    for loss, *_ in LINES:
        if not any(loss in entry for entry in entries):
            parser.error(f"LOG: {args.log} has no {loss}; train with --log-format json")
    figure = new_figure(8.5, 2.6)
    axes = figure.subplots()
    for loss, updates, name, style in LINES:
        points = {int(entry[updates]): float(entry[loss]) for entry in entries if loss in entry}
        axes.plot(*zip(*points.items(), strict=True), **style)
        last = max(points)
        axes.annotate(f" {name} {points[last]:.3f}", (last, points[last]), color=style["color"], va="center")
    axes.set(
        yscale="log",
        xlabel="updates of 64 sentences",
        xlim=(0, last * 1.14),
        title="the demo's training: loss in bits per subword",
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= last])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, args.picture)


if __name__ == "__main__":
    main()
