"""Errors about options that ``own-data`` cannot train with."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.common.options import flag

# Options, and the packages that they need. If a package is missing, fairseq only logs this and ignores the option.
PACKAGES = {
    "tensorboard_logdir": ("tensorboard", "tensorboardX"),
    "wandb_project": ("wandb",),
    "aim_repo": ("aim",),
    "azureml_logging": ("azureml",),
}


def unknown_architecture(arch: str) -> ValueError:
    """Return the error for an unknown architecture; it lists all architectures, with similar names first."""
    ours = sorted(name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, TranslationModel))
    similar = get_close_matches(arch, ours, n=len(ours))
    names = ", ".join([*similar, *(name for name in ours if name not in similar)])
    return ValueError(
        f"--arch {arch}: unknown architecture; choose one of {names}, or give --user-dir for your own architecture"
    )


def refuse_missing_packages(options: Mapping[str, Any]) -> None:
    """Refuse options of fairseq-train whose package is not installed.

    Raises:
        ValueError: a package is missing.
    """
    for name, packages in PACKAGES.items():
        if options.get(name) and not any(map(find_spec, packages)):
            raise ValueError(f"--train: {flag(name)} needs the package {packages[0]}: pip install {packages[0]}")
