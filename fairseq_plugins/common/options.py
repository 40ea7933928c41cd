"""Options: filling them in, checking their ranges, and registering architectures, which are named sets of them.

Options in which architectures differ are None in the configuration: hydra merges its defaults before it looks at the
architecture, and takes for the user's wish what is set by then.
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

Options = Namespace | DictConfig  # of a model


def architecture(options: Any) -> Any:
    """Return the name of a model's architecture, in whichever of fairseq's two ways its options have it, or None."""
    return getattr(options, "arch", None) or getattr(options, "_name", None)


def flag(option: str) -> str:
    """Return the option as the command line spells it."""
    return f"--{option.replace('_', '-')}"


def fill_in(args: Options, values: Mapping[str, Any]) -> None:
    """Give options their values where nobody has set them."""
    for option, value in values.items():
        # None, because that is how a configuration says so, and how omegaconf 2.0 answers for an option it has not.
        if getattr(args, option, None) is None:
            setattr(args, option, value)


def register_presets(model: str, config: type[FairseqDataclass], presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Register architectures of a model.

    Options that the user has not given take the preset's value, and the configuration's default where it has none.

    Args:
        model: name of the registered model.
        config: its configuration.
        presets: for each architecture, the options in which it differs from the configuration's defaults.
    """
    defaults = {name: value for name, value in vars(config()).items() if not name.startswith("_")}
    for architecture, values in presets.items():
        register_model_architecture(model, architecture)(partial(fill_in, values={**defaults, **values}))


@dataclass(frozen=True)
class Range:
    """Finite numbers from the least to the most, or from above the least."""

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
    """Refuse numbers outside the ranges that a configuration's fields have in their metadata; None is unset.

    Args:
        cfg: the options.
        config: their class.

    Raises:
        ValueError: names the option, its range and its value.
    """
    for each in fields(config):
        allowed, value = each.metadata.get("range"), getattr(cfg, each.name, None)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"{flag(each.name)} must be {allowed}, got {value}")
