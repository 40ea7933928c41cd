"""Options of models: defaults, allowed ranges, and architectures, which are named sets of options.

In a configuration class, the default of an option that differs between architectures is None.  hydra applies these
defaults before the architecture, which could not tell another default from a value that the user has set.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture
from omegaconf import DictConfig

Options = Namespace | DictConfig  # a model's options


def architecture(options: Any) -> Any:
    """Return the name of a model's architecture or None; fairseq stores the name as ``arch`` or as ``_name``."""
    return getattr(options, "arch", None) or getattr(options, "_name", None)


def flag(option: str) -> str:
    """Return the option in command-line spelling."""
    return f"--{option.replace('_', '-')}"


def fill_in(args: Options, values: Mapping[str, Any]) -> None:
    """Set the options that are unset to the given values."""
    for option, value in values.items():
        # An unset option is None, and omegaconf 2.0 returns None for an unknown option.
        if getattr(args, option, None) is None:
            setattr(args, option, value)


def register_presets(model: str, config: type[FairseqDataclass], presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the architectures of a model.

    The value of an option is the user's, or else the architecture's, or else the default of the configuration class.

    Args:
        model: name of the registered model.
        config: its configuration class.
        presets: for each architecture, the options that differ from the defaults.
    """
    defaults = {name: value for name, value in vars(config()).items() if not name.startswith("_")}
    for architecture, values in presets.items():
        register_model_architecture(model, architecture)(partial(fill_in, values={**defaults, **values}))


@dataclass(frozen=True)
class Range:
    """A range of finite numbers, which excludes its lower bound if ``above`` is true."""

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "finite"
        least = f"above {self.least}" if self.above else f"at least {self.least}"
        return f"finite and {least}" if self.most == math.inf else f"{least} and at most {self.most}"


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SIZE = Range(1)
FINITE = Range(-math.inf)
FRACTION = Range(0, 1)


def check_ranges(cfg: Any, config: type[FairseqDataclass]) -> None:
    """Refuse numbers outside the ranges that a configuration class declares in its fields' metadata.

    Args:
        cfg: options.
        config: their configuration class.

    Raises:
        ValueError: a number is outside its range.
    """
    for each in fields(config):
        allowed, value = each.metadata.get("range"), getattr(cfg, each.name, None)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"{flag(each.name)} must be {allowed}, got {value}")
