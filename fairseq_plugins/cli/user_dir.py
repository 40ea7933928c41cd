"""Print the path for fairseq's --user-dir."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import fairseq_plugins

# The installed folder has a unique name, which setup.py defines.
_ROOT = Path(fairseq_plugins.__file__).parents[1]
USER_DIR = next(
    (folder for name in ("fairseq_plugins_user_dir", "user_dir") if (folder := _ROOT / name).is_dir()),
    _ROOT / "user_dir",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add no arguments."""


def run(args: Namespace) -> None:
    """Print the path."""
    print(USER_DIR)
