"""Arguments that several commands share, and the plugin's user directory."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import fairseq_plugins

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

# The installed folder has a unique name, which setup.py defines.
_ROOT = Path(fairseq_plugins.__file__).parents[1]
USER_DIR = next(
    (folder for name in ("fairseq_plugins_user_dir", "user_dir") if (folder := _ROOT / name).is_dir()),
    _ROOT / "user_dir",
)


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def add_user_dir(parser: ArgumentParser | _ArgumentGroup, default: Path | None = None) -> None:
    """Add ``--user-dir``, whose value is passed to `import_user_dir`."""
    parser.add_argument(
        "--user-dir",
        type=_folder,
        default=default,
        metavar="DIR",
        help="folder with Python code that registers your own architecture, like fairseq-train's --user-dir",
    )


def import_user_dir(folder: Path | None) -> None:
    """Import the user directory ``folder``; do nothing for None."""
    from fairseq.utils import import_user_module

    try:
        import_user_module(Namespace(user_dir=folder))
    except ImportError as error:
        raise ValueError(
            f"--user-dir {folder} cannot be imported: {error}; correct the code, or give another folder"
        ) from error


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"{text} is not a folder; give a folder whose code registers your architecture")
    return Path(text)
