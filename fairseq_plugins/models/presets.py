"""Registering architectures: named sets of option values for a model.

Options in which architectures differ are None in the configuration: hydra merges its defaults before it looks at the
architecture, and what it finds set it takes for the user's wish.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture

from fairseq_plugins.models.options import fill_in

__all__ = ["register_presets"]


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
