"""Options of models, as they are read."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

__all__ = ["Options", "fill_in", "refuse_unless_positive"]

Options = Namespace | DictConfig  # of a model


def fill_in(args: Options, values: Mapping[str, Any]) -> None:
    """Give options their values where nobody has set them."""
    for option, value in values.items():
        # None, because that is how a configuration says so, and how omegaconf 2.0 answers for an option it has not.
        if getattr(args, option, None) is None:
            setattr(args, option, value)


def refuse_unless_positive(cfg: Any, *options: str, most: float = math.inf) -> None:
    """Refuse values that are not above zero, or above the most.

    Raises:
        ValueError: names the option and its value.
    """
    for option in options:
        if not (value := getattr(cfg, option)) > 0:
            raise ValueError(f"--{option.replace('_', '-')} must be positive, but it is {value}")
        if value > most:
            raise ValueError(f"--{option.replace('_', '-')} is {value}, {most} are the most")
