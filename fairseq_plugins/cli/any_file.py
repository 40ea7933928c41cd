"""Errors in reading somebody else's file."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def blaming(path: Path, cannot: str) -> Iterator[None]:
    """Whatever goes wrong is the file's fault; ``cannot`` says what could not be done with it.

    Raises:
        ValueError: names the file, unless it is an error that does so already.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a file can cause any error
        named = isinstance(error, ValueError | OSError | pickle.UnpicklingError)
        if named and not isinstance(error, UnicodeError):
            raise
        raise ValueError(f"{path} {cannot}: {type(error).__name__}: {error}") from error
