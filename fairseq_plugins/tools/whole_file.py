"""Files that are written whole, or stay what they were."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write under, for a file that takes its place at the end.

    What is no plain file, as /dev/stdout, is written to under its own name.

    Raises:
        OSError: it could not be written; the error of a full disk is told with the file's name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    beside = path if in_place else path.with_name(path.name + ".partial")
    try:
        yield beside
        if not in_place:
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
    except BaseException as error:
        if not in_place:
            with suppress(OSError):  # a full disk should not stay full for it
                beside.unlink()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(f"{path} was not written: {error.strerror or error}") from error
        raise
