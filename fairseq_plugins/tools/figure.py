"""matplotlib, which is an optional dependency."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure"]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # importing fairseq sets the root logger to DEBUG
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("plotting needs matplotlib: pip install 'fairseq_plugins[plots]'") from error
    return Figure(figsize=(width, height))
