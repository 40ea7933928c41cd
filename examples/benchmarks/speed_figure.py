#!/usr/bin/env python3
"""Draw the README's picture of decoding speed: ``speed_figure.py docs/speed.png``.

The seconds come from the first table of ``docs/performance.md``, so that picture and table agree.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from fairseq_plugins.cli.figure import new_figure

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
# Colours of fairseq, this plugin and CTranslate2; the three colours also differ in greyscale.
GREY, BLUE, ORANGE = "#999999", "#0072b2", "#e69f00"

# For each bar: row of the table, label, and colour.
BARS = [
    ("fairseq's fconv as shipped", "fairseq's fconv", GREY),
    ("`convs2s`, `translation_fast`", "convs2s", BLUE),
    ("`convs2s`, `translation_fast`, `--cpu-dtype int8`", "convs2s, int8", BLUE),
    ("fairseq's `transformer`", "fairseq's transformer", GREY),
    ("`weighted_transformer_small`, `translation_fast`", "weighted_transformer", BLUE),
    ("`weighted_transformer_small`, `translation_fast`, `--cpu-dtype int8`", "weighted_transformer, int8", BLUE),
    ("CTranslate2 4.8.5, Transformer, float32", "CTranslate2's Transformer", ORANGE),
    ("CTranslate2, int8", "CTranslate2's Transformer, int8", ORANGE),
]


def read_table(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns' names, and the cells of each row; a row called "the same" gets the name of the row above."""
    lines = text[text.index("\n| | seconds |") :].strip().split("\n\n")[0].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table, model = {}, ""
    for name, *cells in rows:
        model = model if name.startswith("the same") else name
        table[name.replace("the same", model)] = cells
    return heading[1:], table


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="file to write")
    args = parser.parse_args()
    columns, table = read_table(PAGE.read_text(encoding="utf-8"))
    figure = new_figure(8.5, 3)
    panels = (("seconds", "16 sentences"), ("one sentence, seconds", "one sentence"))
    axes = figure.subplots(1, len(panels), sharey=True)
    _, labels, colours = zip(*BARS, strict=True)
    for axis, (column, title) in zip(axes, panels, strict=True):
        seconds = [table[row][columns.index(column)] for row, *_ in BARS]
        axis.bar_label(axis.barh(labels, list(map(float, seconds)), color=colours), seconds, padding=3)
        axis.set_title(f"{title}, seconds")
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(args.picture)


if __name__ == "__main__":
    main()
