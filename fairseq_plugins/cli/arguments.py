"""What arguments of several commands are."""

from __future__ import annotations

import errno
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISDIR


def positive(text: str) -> int:
    """A number of things of which there is at least one.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def refuse_existing(path: Path) -> None:
    """Refuse an output that would take the place of something, be it a symbolic link that leads nowhere.

    Raises:
        ValueError: it would.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} exists already")


def refuse_missing_folder(path: Path) -> None:
    """Refuse a file to write in a folder that does not exist.

    Raises:
        ValueError: it does not.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder to write {path.name} to")


def refuse_unreadable(*paths: Path | None) -> None:
    """Refuse missing files and folders where files are to be read, before anything slow begins.

    Raises:
        OSError: the first one is missing or a folder.
    """
    for path in paths:
        if path is not None and S_ISDIR(path.stat().st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def refuse_input_as_output(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over a file that is read.

    Raises:
        ValueError: the output is one of the inputs, under whatever name.
    """
    if output.is_file() and any(path.is_file() and path.samefile(output) for path in inputs):
        raise ValueError(f"{output} is also to be read: choose another file to write")


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
