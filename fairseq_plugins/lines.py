"""Lines of text that somebody else has written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["decoded"]


def decoded(file: Iterable[bytes], path: Path) -> Iterator[str]:
    """The lines of a file with their ends, without a byte order mark; as text, a carriage return would end a line.

    Raises:
        ValueError: one is not UTF-8.
    """
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8: {error}") from error
