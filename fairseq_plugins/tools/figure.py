"""matplotlib, which is an optional dependency."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["line_styles", "new_figure"]

# Okabe and Ito's, which colour-blind readers can tell apart, but for yellow, too pale for a line.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
_DASHES = ["-", "--", ":", "-."]


def line_styles(number: int) -> dict[str, str]:
    """How the lines of a picture differ: by colour, and when those are used up by their dashes."""
    rounds, colour = divmod(number, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[rounds % len(_DASHES)]}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that makes room for all that is written on it; sizes in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # importing fairseq sets the root logger to DEBUG
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("plotting needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")
