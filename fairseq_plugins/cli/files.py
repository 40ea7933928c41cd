"""Files and folders of commands: validation, names in errors, locks, and records of settings."""

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
    """Refuse an output path that exists, even as a broken symbolic link.

    Raises:
        ValueError: the path exists.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} already exists: choose another output")


def refuse_missing_folder(path: Path) -> None:
    """Refuse an output file in a missing folder.

    Raises:
        ValueError: the folder does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")


def refuse_unreadable(*paths: Path | None) -> None:
    """Refuse missing input files, and folders in their place, before slow imports.

    Raises:
        OSError: a file is missing, or a folder.
    """
    for path in paths:
        if path is not None and S_ISDIR(path.stat().st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def refuse_input_as_output(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to overwrite an input file.

    Raises:
        ValueError: the output is one of the inputs, also through links.
    """
    if output.is_file() and any(path.is_file() and path.samefile(output) for path in inputs):
        raise ValueError(f"{output} is also an input: choose another output")


@contextmanager
def naming_file_in_errors(path: Path, cannot: str) -> Iterator[None]:
    """Turn errors in this context into errors that name the file.

    Args:
        path: the file.
        cannot: the part of the message after its name, such as "cannot be exported".

    Raises:
        ValueError: any error that does not name a file yet.
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
    """Lock a folder, and tell users how to resume if they stop the command.

    The system releases the lock when this process and its children have ended: a training that outlives its killed
    parent keeps the lock.

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
            print("\nThe same command resumes here.", file=sys.stderr)
            raise
        finally:
            # Grandchildren of a killed child may hold the lock for some more seconds.
            fcntl.flock(file, fcntl.LOCK_UN)


def refuse_other_settings(record: Path, settings: Mapping[str, object], made: Iterable[Path]) -> None:
    """Refuse to continue the work of an earlier call with other settings, and record the settings.

    Args:
        record: file of the settings.
        settings: names and values.
        made: results of earlier calls; without results, other settings are allowed.

    Raises:
        ValueError: the record has other settings.
    """
    now = {name: str(value) for name, value in settings.items()}
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() and any(made) else now
    for name, value in now.items():
        if (other := before.get(name)) != value:
            raise ValueError(f"{record.parent} has {name} {other}, not {value}: choose another folder")
    with replacing(record) as beside:
        beside.write_text(json.dumps(now), encoding="utf-8")
