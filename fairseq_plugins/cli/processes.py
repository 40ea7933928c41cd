"""This process and those that it starts: signals, standard streams, fairseq's commands."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

GRACE = 5  # seconds that a program has to end by itself
UNWRITABLE = {errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EBADF}

# Later fairseqs leave a last batch out that is no multiple of 8 sentences, in validation and generation too.
ALL_SENTENCES = ["--required-batch-size-multiple", "1"]

# Of validation and test, as fairseq always does in training; else it ends at the first that is too long for the model.
NO_LONG_ONES = ["--skip-invalid-size-inputs-valid-test"]

SHOWN = 15  # lines of a command that failed

# As the installed command, but for the working folder, where modules would be looked for first: there may be a
# sacrebleu.py among the texts. The option against it, -P, came with Python 3.11.
RUN = """import sys
sys.path[:] = filter(None, sys.path)
sys.argv[0] = "fairseq-{}"
from fairseq_cli.{} import cli_main
{}
cli_main()
"""


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
            # The program inherits the files that are marked inheritable: a lock.
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


def fairseq(command: str, *options: object) -> None:
    """Run ``fairseq-COMMAND`` and show nothing of its output.

    Raises:
        ValueError: it fails; with its last lines.
    """
    with closing(fairseq_lines(command, *options)) as lines:
        for _ in lines:
            pass


def fairseq_lines(
    command: str, *options: object, stdin: int | None = subprocess.DEVNULL, before: str = ""
) -> Generator[str, None, None]:
    """Run ``fairseq-COMMAND`` and yield the lines that it prints; closed before the end, it is ended.

    Args:
        command: name of the command.
        options: its arguments.
        stdin: its standard input.
        before: Python code that runs in its process before it.

    Raises:
        ValueError: it fails; with its last lines.
    """
    words = [str(option) for option in options]
    print(f"\n$ {shlex.join([f'fairseq-{command}', *words])}", file=sys.stderr, flush=True)
    # fairseq uses its libraries in ways that they have come to warn of.
    call = [sys.executable, "-u", "-W", "ignore", "-c", RUN.format(command, command.replace("-", "_"), before), *words]
    # The processes that it starts itself look nowhere else either, from Python 3.11 on.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    last: deque[str] = deque(maxlen=SHOWN)
    with running(call, **pipes, encoding="utf-8", env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "{'_name'" not in line:  # the whole configuration, many screens long
                last.append(line)
                yield line
    if process.returncode < 0:
        raise ValueError(f"fairseq-{command} was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        end = "".join(last).rstrip()
        raise ValueError(f"fairseq-{command} failed (status {process.returncode}); the end of what it printed:\n{end}")


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a program whose standard input or error stream may be closed, but not its output.

    When the reader of the output has left (``| head``), the program ends by SIGPIPE, as others do.

    Raises:
        SystemExit: the standard output is closed, or cannot be written.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file to be opened would be this stream
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (for as long as the process)
    if sys.stdout is None:
        sys.exit("fairseq-plugins: error: the standard output is closed")
    try:
        yield
    except OSError as error:
        if not is_of_output(error):
            raise
        _end_by_output(error)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            _end_by_output(error)


def is_of_output(error: BaseException) -> bool:
    """Whether an error comes from the standard output: all files that are written are named (`replacing`)."""
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE


def _end_by_output(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try again at its end, and print a traceback
    sys.exit(f"fairseq-plugins: error: the standard output was not written: {error.strerror}")
