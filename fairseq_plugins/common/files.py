"""Decode text files line by line, and write files and folders whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory


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


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give a name for a file or folder that takes the place of ``path`` at the end, and is removed after an error.

    Several processes may write one path: each has its own name, and the last to end wins.
    """
    unfinished = _name_beside(path)
    try:
        yield unfinished
        if not unfinished.is_dir():
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())  # else, after a power failure, the new name may stand before the new content
        unfinished.replace(path)
    except BaseException:
        _remove(unfinished)  # a full disk should not stay full for it
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name to write a file under, which takes the place of ``path`` at the end.

    A symbolic link stays, and the file that it names is replaced. A device or a pipe is written to.

    Raises:
        OSError: it could not be written; names ``path``.
    """
    if number := _standard_stream(path):
        with TemporaryDirectory() as folder:
            yield (content := Path(folder, "content"))
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            with content.open("rb") as source, os.fdopen(os.dup(number), "ab") as file:
                shutil.copyfileobj(source, file)
        return
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        if target.is_symlink() or (target.exists() and not target.is_file()):  # a loop of links fails when opened
            yield path
        else:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, "the file is read-only", str(path))
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
    """Name a file in errors of the system that name none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.strerror is not None:
            raise OSError(f"{path} was not written: {error.strerror}") from error
        raise


def _name_beside(path: Path) -> Path:
    """A name for this process alone; what killed processes of this machine have left under theirs is removed."""
    before, after = f"{path.name}.{os.uname().nodename}-", ".tmp"
    own = path.with_name(f"{before}{os.getpid()}{after}")
    _remove(own)  # of a killed process that had the same number
    for left in path.parent.glob(f"{escape(before)}*{after}"):
        with suppress(ValueError, OverflowError, PermissionError):  # the last: somebody else's process
            try:
                os.kill(int(left.name[len(before) : -len(after)]), 0)
            except ProcessLookupError:
                _remove(left)
    return own


def _remove(path: Path) -> None:
    """Remove a file or folder, as far as it is there and can be removed."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _standard_stream(path: Path) -> int | None:
    """The number of the standard stream that ``path`` is, if any: opened by its name, it would be written over."""
    for number in (1, 2):
        with suppress(OSError):  # there is no such file, or the stream is closed
            if os.path.samestat(os.fstat(number), path.stat()):
                return number
    return None
