"""Files and folders: decoding, validation, locks, checksums, and outputs that are written completely or not at all."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

NO_TEXT = (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")  # first bytes of gzipped files, and of text in UTF-16


def decoded(file: Iterable[bytes], path: Path, errors: str = "strict") -> Iterator[str]:
    """Yield the lines of a file as text, including their line ends but without a byte order mark.

    Raises:
        ValueError: the file is gzipped or in UTF-16, or, if ``errors`` is strict, has invalid UTF-8.
    """
    for number, line in enumerate(file, start=1):
        if number == 1 and line.startswith(NO_TEXT):
            raise ValueError(f"{path} is gzipped or in UTF-16: decompress it, or convert it to UTF-8")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: invalid UTF-8, convert the file: {error}") from error


def refuse_pipe(path: Path) -> None:
    """Refuse a pipe, which can be read only once."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file and must be read more than once: copy it to a file")


def count_lines(path: Path) -> int:
    """Count the lines of a text file; refuse an empty file, and a pipe, which could not be read again."""
    refuse_pipe(path)
    number, line = 0, ""
    with path.open("rb") as file:
        for number, line in enumerate(decoded(file, path), start=1):  # noqa: B007  (the values after the loop are used)
            pass
    if number == 0:
        raise ValueError(f"{path} is empty: give a file with one sentence per line")
    if number == 1 and "\r" in line.strip():
        raise ValueError(f"{path} ends lines with carriage returns: convert them to line feeds")
    return number


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


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``.

    At the end, the temporary file or folder is renamed to ``path``; after an error, it is removed.  Several processes
    may write the same path.  Each process has its own temporary path, and the last process to finish determines the
    content.
    """
    unfinished = _name_beside(path)
    try:
        yield unfinished
        if not unfinished.is_dir():
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())  # without fsync, a power failure may leave ``path`` without content
        unfinished.replace(path)
    except BaseException:
        _remove(unfinished)  # also free the disk space, because the disk may be full
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` at the end.

    If ``path`` is a symbolic link, its target is replaced.  A folder, a device or a named pipe is not replaced.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        # If ``path`` leads to a loop of symbolic links, ``target`` is still a link; opening ``path`` raises an error.
        if target.is_symlink() or (target.exists() and not target.is_file()):
            yield path
        else:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(f"{path} is read-only: make it writable, or choose another file")
            with beside(target) as unfinished:
                try:
                    yield unfinished
                except OSError as error:
                    if error.filename == str(unfinished):
                        error.filename = None
                    raise
                if target.exists():
                    shutil.copymode(target, unfinished)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that has no file name, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.strerror is not None:
            raise OSError(f"{path} cannot be written: {error.strerror}") from error
        raise


def _name_beside(path: Path) -> Path:
    """Return a temporary path for this process, and remove temporary files of killed processes on this machine."""
    before, after = f"{path.name}.{os.uname().nodename}-", ".tmp"
    own = path.with_name(f"{before}{os.getpid()}{after}")
    _remove(own)  # a killed process with the same process number may have left a temporary file
    for left in path.parent.glob(f"{escape(before)}*{after}"):
        # A PermissionError means that the process exists and belongs to another user.
        with suppress(ValueError, OverflowError, PermissionError):
            try:
                os.kill(int(left.name[len(before) : -len(after)]), 0)
            except ProcessLookupError:
                _remove(left)
    return own


def _remove(path: Path) -> None:
    """Remove a file or folder if possible."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
