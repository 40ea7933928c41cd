"""Options of models, as they are read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

__all__ = ["Options", "fill_in"]

Options = Namespace | DictConfig  # of a model


def fill_in(args: Options, values: Mapping[str, Any]) -> None:
    """Give options their values where nobody has set them."""
    for option, value in values.items():
        # None, because that is how a configuration says so, and how omegaconf 2.0 answers for an option it has not.
        if getattr(args, option, None) is None:
            setattr(args, option, value)
