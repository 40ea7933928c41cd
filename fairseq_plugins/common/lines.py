"""Decode UTF-8 files line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path


def decoded(file: Iterable[bytes], path: Path, errors: str = "strict") -> Iterator[str]:
    """Decode the lines of a file, with their ends and without a byte order mark; only a line feed ends a line.

    Raises:
        ValueError: one is not UTF-8.
    """
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8: {error}") from error


def refuse_pipe(path: Path) -> None:
    """Refuse what is there and cannot be read several times: a pipe would be waited for.

    Raises:
        ValueError: it is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file, and is read more than once: copy it to one")


def count_lines(path: Path) -> int:
    """Count the lines of a file that is read again afterwards.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, not UTF-8, has no lines, or ends them with carriage returns alone.
    """
    refuse_pipe(path)
    number, line = 0, ""
    with path.open("rb") as file:
        for number, line in enumerate(decoded(file, path), start=1):  # noqa: B007  (the last ones are used)
            pass
    if number == 0:
        raise ValueError(f"{path} is empty: give a file with one sentence a line")
    if number == 1 and "\r" in line.strip():
        raise ValueError(f"{path} ends its lines with carriage returns: convert it to line feeds")
    return number
