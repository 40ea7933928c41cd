"""Files and folders of commands: refuse wrong ones, name them in errors, lock them, and record how they were made."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR

from fairseq_plugins.common.files import replacing


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


@contextmanager
def blaming(path: Path, cannot: str) -> Iterator[None]:
    """Turn errors of this context into errors that name the file.

    Args:
        path: the file.
        cannot: the part of the message after its name, such as "cannot be exported".

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


@contextmanager
def work_in(folder: Path) -> Iterator[None]:
    """Keep others out of a folder, and say where it stopped what a stop means.

    The lock is the system's, and vanishes with this process and those that it has started: a training that outlives a
    killed parent keeps others out too.

    Raises:
        ValueError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another call, or what it has started, is at work in {folder}") from None
        os.set_inheritable(file.fileno(), True)
        try:
            yield
        except KeyboardInterrupt:
            print("\nThe same call goes on from where this one was stopped.", file=sys.stderr)
            raise
        finally:
            # Not left to the end of all children: of one that had to be killed, others may be left for some seconds.
            fcntl.flock(file, fcntl.LOCK_UN)


def refuse_other_settings(record: Path, settings: Mapping[str, object], made: Iterable[Path]) -> None:
    """Refuse to continue an earlier call's work with other settings, and record these.

    Args:
        record: file of the settings.
        settings: their names and values.
        made: results of earlier calls; without any, other settings are allowed.

    Raises:
        ValueError: the record has other settings.
    """
    now = {name: str(value) for name, value in settings.items()}
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() and any(made) else now
    for name, value in now.items():
        if (other := before.get(name)) != value:
            raise ValueError(f"{record.parent} was made with {name} {other}, not {value}; choose another folder")
    with replacing(record) as beside:
        beside.write_text(json.dumps(now), encoding="utf-8")
