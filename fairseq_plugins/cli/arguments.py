"""Arguments that several commands share."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path


def positive(text: str) -> int:
    """A number of things of which there is at least one.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def add_user_dir(parser: ArgumentParser, default: Path | None = None) -> None:
    """``--user-dir``, for `import_user_dir`."""
    parser.add_argument(
        "--user-dir",
        type=_folder,
        default=default,
        metavar="DIR",
        help="for an architecture of your own: the folder that registers it, as fairseq-train's --user-dir",
    )


def import_user_dir(folder: Path | None) -> None:
    """Import a user directory, if there is one.

    Raises:
        ValueError: something that it imports is not there, or a module of its name is.
    """
    from fairseq.utils import import_user_module  # noqa: PLC0415  (with torch: seconds)

    try:
        import_user_module(Namespace(user_dir=folder))
    except ImportError as error:
        raise ValueError(f"--user-dir {folder}: {error}") from error


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no folder {text}")
    return Path(text)
