"""Options of models: filling them in, checking them, and registering architectures, which are named sets of them.

Options in which architectures differ are None in the configuration: hydra merges its defaults before it looks at the
architecture, and takes for the user's wish what is set by then.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture
from omegaconf import DictConfig

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
