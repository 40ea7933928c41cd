"""Work of hours: by one process at a time, stopped whenever one likes, and gone on with by the same call."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fairseq_plugins.common.whole_file import replacing

GRACE = 5  # seconds that a program has to end by itself


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
    """What a former call has made is not made again, and so must be of the same settings, which are recorded.

    Args:
        record: the file for them.
        settings: what all that is made there shares.
        made: what is there; where nothing is, the settings of a call that failed do not bind.

    Raises:
        ValueError: the record is of others.
    """
    now = {name: str(value) for name, value in settings.items()}
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() and any(made) else now
    for name, value in now.items():
        if (other := before.get(name)) != value:
            raise ValueError(f"{record.parent} was made with {name} {other}, not {value}; choose another folder")
    with replacing(record) as beside:
        beside.write_text(json.dumps(now), encoding="utf-8")


@contextmanager
def stoppable() -> Iterator[None]:
    """A signal that would end this process does so when what it has started has been ended.

    What is ignored, as under nohup, stays so.
    """
    with _handled_by(_stop):
        try:
            yield
        except KeyboardInterrupt as stop:
            (number,) = stop.args
            print("fairseq-plugins: stopped", file=sys.stderr)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # so that a shell sees why it ended, and ends its own loops


@contextmanager
def running(call: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Another program, which is ended where this one is stopped or fails meanwhile."""
    early: list[int] = []
    with ExitStack() as stack:
        # A stop in the middle of its start would leave it alone.
        with _handled_by(lambda number, _: early.append(number)):
            # Of what is open here it gets what is marked for it: a lock.
            process = stack.enter_context(subprocess.Popen(call, text=True, close_fds=False, **options))
            stack.push(lambda error, *_: _end(process) if error else None)
        for number in early:
            signal.raise_signal(number)
        yield process


def _stop(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def _end(process: subprocess.Popen[str]) -> None:
    """First so that it can end what it has started itself, as fairseq's processes that load data."""
    process.send_signal(signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """The signals that would end this process, but for those that are ignored, or not Python's to set back."""
    with ExitStack() as before:  # which sets all of them back, even where a stop comes between two
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (old := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                before.callback(signal.signal, number, old)
                signal.signal(number, handler)
        yield
