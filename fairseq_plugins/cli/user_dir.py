"""``fairseq-plugins user-dir``: the path for fairseq's ``--user-dir``, wherever the package is installed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import fairseq_plugins

# Installed, the folder has a name that cannot clash (setup.py).
_ROOT = Path(fairseq_plugins.__file__).parents[1]
USER_DIR = next(
    (folder for name in ("fairseq_plugins_user_dir", "user_dir") if (folder := _ROOT / name).is_dir()),
    _ROOT / "user_dir",
)


def add_arguments(parser: ArgumentParser) -> None:
    """The command takes none."""


def run(args: Namespace) -> None:
    """Print the path."""
    print(USER_DIR)
