"""Print the path for fairseq's --user-dir."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from fairseq_plugins.cli.arguments import USER_DIR


def add_arguments(parser: ArgumentParser) -> None:
    """Add no arguments."""


def run(args: Namespace) -> None:
    """Print the path."""
    print(USER_DIR)
