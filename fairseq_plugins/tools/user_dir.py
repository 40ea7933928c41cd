"""``fairseq-plugins user-dir``: the path for fairseq's ``--user-dir``, wherever the package is installed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import fairseq_plugins

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command takes none."""


def run(args: Namespace) -> None:
    """Print the path: the package itself is a module that fairseq can import."""
    print(Path(fairseq_plugins.__file__).parent)
