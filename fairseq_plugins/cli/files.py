"""Files and folders of commands: validation, file names in errors, locks, and checksums."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(path: Path, makes_folder: bool = False) -> None:
    """Refuse an output path if the path exists, even as a broken symbolic link, or if its folder is missing.

    Raises:
        ValueError: the path exists, or its folder does not exist and ``makes_folder`` is false.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} already exists: choose another output")
    if not makes_folder and not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")


def refuse_input_as_output(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to overwrite an input file.

    Raises:
        ValueError: the output is one of the inputs, or a link to it.
    """
    if output.is_file() and any(path.is_file() and path.samefile(output) for path in inputs):
        raise ValueError(f"{output} is also an input: choose another output")


@contextmanager
def naming_file_in_errors(path: Path, cannot: str) -> Iterator[None]:
    """Turn an error that names no file into a ValueError that names the file.

    Args:
        path: the file.
        cannot: the part of the message after the file's name, such as "cannot be exported".

    Raises:
        ValueError: the code in the ``with`` block raised an error that names no file.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # reading a malformed file can raise any exception
        named = isinstance(error, ValueError | OSError | pickle.UnpicklingError)
        if named and not isinstance(error, UnicodeError):
            raise
        raise ValueError(
            f"{path} {cannot}: {type(error).__name__}: {error}; correct the file, or give another file"
        ) from error


@contextmanager
def work_in(folder: Path) -> Iterator[None]:
    """Lock a folder during the ``with`` block; if the user stops the command, print how to resume.

    The system releases the lock only when this process and its children have ended, so a training keeps the lock even
    if its parent was killed.

    Raises:
        ValueError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use by another call or its child processes: wait until they end"
            ) from None
        os.set_inheritable(file.fileno(), True)
        try:
            yield
        except KeyboardInterrupt:
            print("\nRun the same command again to resume.", file=sys.stderr)
            raise
        finally:
            # Without this unlock, grandchild processes could keep the lock for some seconds after the child was killed.
            fcntl.flock(file, fcntl.LOCK_UN)


def digest(path: Path, algorithm: str, unzip: bool = False) -> str:
    """Return the checksum of a file, or of the content of a gzipped file, in hexadecimal digits."""
    found = hashlib.new(algorithm)
    with gzip.open(path) if unzip else path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
