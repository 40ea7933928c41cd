"""What arguments of several commands are."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

__all__ = ["add_user_dir", "positive"]


def positive(text: str) -> int:
    """A number of things of which there is at least one.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def add_user_dir(parser: ArgumentParser, default: Path | None = None) -> None:
    """``--user-dir``, which fairseq's ``import_user_module`` takes."""
    parser.add_argument(
        "--user-dir",
        type=_folder,
        default=default,
        metavar="DIR",
        help="for an architecture of your own: the folder that registers it, as fairseq-train's --user-dir",
    )


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no folder {text}")
    return Path(text)
