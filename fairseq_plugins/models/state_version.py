"""The version of a checkpoint's layout, which every model saves as a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["check_version", "register_version"]


def register_version(model: nn.Module, version: int) -> None:
    """Let the model save the version of its layout."""
    model.register_buffer("version", torch.tensor(version))


def check_version(state_dict: Mapping[str, Any], version: int, family: str) -> None:
    """Refuse the layout of a later version of this code.

    Raises:
        ValueError: the checkpoint was written by a newer version than this one.
    """
    found = int(state_dict.get("version", version))
    if found > version:
        raise ValueError(
            f"the checkpoint has the layout of version {found} of the {family} models, and this code knows {version}; "
            "a newer fairseq_plugins will load it"
        )
