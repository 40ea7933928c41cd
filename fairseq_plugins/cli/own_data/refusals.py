"""Errors of options with which ``own-data`` cannot train."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag

# Packages of which an option needs one; without it fairseq only says so in its log, and trains.
PACKAGES = {
    "tensorboard_logdir": ("tensorboard", "tensorboardX"),
    "wandb_project": ("wandb",),
    "aim_repo": ("aim",),
    "azureml_logging": ("azureml",),
}


def unknown_architecture(arch: str) -> ValueError:
    """Return the error for an architecture that does not exist; it lists this plugin's, similar names first."""
    ours = sorted(name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, TranslationModel))
    similar = get_close_matches(arch, ours, n=len(ours))
    names = ", ".join([*similar, *(name for name in ours if name not in similar)])
    return ValueError(
        f"--arch {arch}: there is no such architecture; this plugin has {names}; --user-dir names a folder that "
        "registers your own"
    )


def refuse_missing_packages(options: Mapping[str, Any]) -> None:
    """Refuse options of fairseq-train that need a package that is not installed.

    Raises:
        ValueError: there is one.
    """
    for name, packages in PACKAGES.items():
        if options.get(name) and not any(map(find_spec, packages)):
            raise ValueError(f"--train: {flag(name)} needs the package {packages[0]}: pip install {packages[0]}")
