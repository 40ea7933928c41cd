"""Draw the parts of an architecture's picture: boxes, arrows, sums, and frames around repeated layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from matplotlib.patches import Circle, FancyBboxPatch

from fairseq_plugins.cli.figure import new_figure

# Colours of the inside and the edge of a box: paler versions of Okabe and Ito's colours.
COLOURS = {
    "embedding": ("#fbe3c0", "#b36b00"),
    "linear": ("#eeeeee", "#777777"),
    "convolution": ("#cfe5f5", "#0072b2"),
    "attention": ("#cdeee2", "#00805e"),
    "network": ("#f3dcea", "#a3507f"),
    "recurrent": ("#f9d5c2", "#c04c00"),
}
INK, LINE, PALE = "#222222", "#555555", "#f8f8f8"
HEIGHT, GAP = 0.44, 0.22  # height of a box, and gap between two boxes; all sizes here are inches


T = TypeVar("T")


class Box(NamedTuple):
    """Position and size of a box."""

    x: float  # middle
    y: float  # lower edge
    width: float
    height: float = HEIGHT

    @property
    def top(self) -> tuple[float, float]:
        return self.x, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x, self.y

    @property
    def left(self) -> tuple[float, float]:
        return self.x - self.width / 2, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


class Paper:
    """A picture; ``labels`` lists all text on the picture."""

    def __init__(self) -> None:
        self.figure = new_figure(1, 1)
        self.figure.set_layout_engine("none")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.labels: list[str] = []

    def text(self, x: float, y: float, text: str, size: float = 8, **style: object) -> None:
        """Write text, centred at a point."""
        self.labels.append(text)
        style = {"ha": "center", "va": "center", "color": INK, "parse_math": False, **style}
        self.axes.text(x, y, text, fontsize=size, zorder=4, **style)

    def box(self, kind: str, x: float, y: float, title: str, sizes: str, width: float = 2.3) -> Box:
        """Draw a part of the model with its name and sizes."""
        fill, edge = COLOURS[kind]
        shape = FancyBboxPatch(
            (x - width / 2 + 0.05, y + 0.05), width - 0.1, HEIGHT - 0.1, boxstyle="round,pad=0.05", fc=fill, ec=edge
        )
        self.axes.add_patch(shape).set_zorder(3)
        self.text(x, y + 0.66 * HEIGHT, title, weight="bold")
        self.text(x, y + 0.28 * HEIGHT, sizes, 7.5)
        return Box(x, y, width)

    def above(self, below: Box, kind: str, title: str, sizes: str, width: float = 2.3, gap: float = GAP) -> Box:
        """Draw a box above another box, and an arrow from the lower box to it."""
        box = self.box(kind, below.x, below.top[1] + gap, title, sizes, width)
        self.arrow(below.top, box.bottom)
        return box

    def residual(self, start: Box, box: Box, width: float, label: str, note: str, widening: str = "") -> Box:
        """Frame the layers between ``start`` and the top of ``box``, and draw their residual connection."""
        add = self.plus(box.x, box.top[1] + GAP + 0.05, note, low=True)
        self.arrow(box.top, add.bottom)
        x, y = box.x - width / 2 + 0.13, start.top[1] + GAP + 0.09
        self.arrow((box.x, y), (x, y), (x, add.left[1]), add.left)
        if widening:
            self.text((x + add.left[0]) / 2, add.left[1] + 0.1, widening, 7.5)
        self.frame(box.x, start.top[1] + GAP - 0.05, add.top[1] + GAP - 0.05, width, label)
        return add

    def plus(self, x: float, y: float, note: str, low: bool = False) -> Box:
        """Draw the symbol of a sum, and a note to its upper right, or to its lower right if ``low``."""
        self.axes.add_patch(Circle((x, y), 0.09, fc="white", ec=LINE, zorder=3))
        self.axes.plot([x - 0.05, x + 0.05], [y, y], color=LINE, linewidth=1, zorder=4)
        self.axes.plot([x, x], [y - 0.05, y + 0.05], color=LINE, linewidth=1, zorder=4)
        self.text(x + 0.14, y + (-0.1 if low else 0.1), note, 7.5, ha="left")
        return Box(x, y - 0.09, 0.18, 0.18)

    def arrow(self, *points: tuple[float, float], tip: bool = True) -> None:
        """Draw straight lines from point to point, with an arrowhead at the end."""
        self.axes.plot(*zip(*points, strict=True), color=LINE, linewidth=1, zorder=2, solid_joinstyle="round")
        if tip:
            style = {"arrowstyle": "-|>,head_length=0.35,head_width=0.15", "color": LINE, "shrinkA": 0, "shrinkB": 0}
            self.axes.annotate("", points[-1], points[-2], arrowprops=style, zorder=2)

    def frame(self, x: float, bottom: float, top: float, width: float, label: str) -> None:
        """Draw a frame around a layer, labelled with its number of repetitions."""
        shape = FancyBboxPatch(
            (x - width / 2 + 0.1, bottom + 0.1),
            width - 0.2,
            top - bottom - 0.2,
            boxstyle="round,pad=0.1",
            fc=PALE,
            ec="#bbbbbb",
        )
        self.axes.add_patch(shape).set_zorder(1)
        self.text(x + width / 2 - 0.08, top - 0.14, label, 9, ha="right", weight="bold", color=LINE)

    def save(self, file: Path, width: float, height: float) -> None:
        """Set the size of the picture and write it."""
        self.figure.set_size_inches(width, height)
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def runs(layers: Iterable[T]) -> list[tuple[int, T]]:
    """Group consecutive equal layers; return pairs (length, layer)."""
    return [(len(list(equal)), layer) for layer, equal in groupby(layers)]
