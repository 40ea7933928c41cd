"""Processes of the commands: signals, standard streams, and fairseq's commands as child processes."""

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

GRACE = 5  # seconds from interrupting a program to killing the program
UNWRITABLE = {errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EBADF}

# Newer fairseq versions drop a last batch whose number of sentences is not a multiple of 8. With
# --required-batch-size-multiple 1, fairseq keeps the last batch.
ALL_SENTENCES = ["--required-batch-size-multiple", "1"]

# In validation and test, skip sentences that are too long for the model, as fairseq does in training.
NO_LONG_ONES = ["--skip-invalid-size-inputs-valid-test"]

SHOWN = 15  # If a command fails, the error message contains the last SHOWN lines of the command's output.

# Run the installed command without the working folder on the module path, because a folder of texts may contain a
# sacrebleu.py. Python's option -P would leave out the working folder, but exists only from Python 3.11 on.
RUN = """import sys
sys.path[:] = filter(None, sys.path)
sys.argv[0] = "fairseq-{}"
from fairseq_cli.{} import cli_main
{}
cli_main()
"""


@contextmanager
def stoppable() -> Iterator[None]:
    """End this process by a signal only after its child processes have ended.

    Ignored signals, as under nohup, stay ignored.
    """
    with _handled_by(_stop):
        try:
            yield
        except KeyboardInterrupt as stop:
            (number,) = stop.args
            print("fairseq-plugins: stopped", file=sys.stderr)
            signal.signal(number, signal.SIG_DFL)
            # The signal kills the process.  If the process exited with a status instead, a shell that runs the command
            # in a loop would continue the loop.
            signal.raise_signal(number)


@contextmanager
def running(call: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and end it if this process is stopped or fails."""
    early: list[int] = []
    with ExitStack() as stack:
        # Signals are delayed, because a signal during the start would leave the program running.
        with _handled_by(lambda number, _: early.append(number)):
            # The program inherits the lock of `files.work_in`.
            process = stack.enter_context(subprocess.Popen(call, text=True, close_fds=False, **options))
            stack.push(lambda error, *_: _end(process) if error else None)
        for number in early:
            signal.raise_signal(number)
        yield process


def _stop(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a program, so that it can end its own children; kill it if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP, except ignored signals and signals with handlers from outside Python."""
    with ExitStack() as before:  # The stack restores all handlers, even if a signal arrives in this loop.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (old := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                before.callback(signal.signal, number, old)
                signal.signal(number, handler)
        yield


def fairseq(command: str, *options: object) -> None:
    """Run ``fairseq-COMMAND``, and hide its output unless it fails."""
    with closing(fairseq_lines(command, *options)) as lines:
        for _ in lines:
            pass


def fairseq_lines(
    command: str, *options: object, stdin: int | None = subprocess.DEVNULL, before: str = ""
) -> Generator[str, None, None]:
    """Run ``fairseq-COMMAND`` and yield its output lines; closing the generator ends the command.

    Args:
        command: name of the command, without ``fairseq-``.
        options: arguments of the command.
        stdin: standard input of the command.
        before: Python code that runs first in the command's process.
    """
    words = [str(option) for option in options]
    print(f"\n$ {shlex.join([f'fairseq-{command}', *words])}", file=sys.stderr, flush=True)
    # Hide deprecation warnings in fairseq.
    call = [sys.executable, "-u", "-W", "ignore", "-c", RUN.format(command, command.replace("-", "_"), before), *words]
    # From Python 3.11 on, PYTHONSAFEPATH keeps the working folder off the module path of the command's children.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    last: deque[str] = deque(maxlen=SHOWN)
    with running(call, **pipes, encoding="utf-8", env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "{'_name'" not in line:  # fairseq's log line with the configuration fills many screens
                last.append(line)
                yield line
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        fix = "the memory was probably full: free some, and repeat" if name == "SIGKILL" else "repeat"
        raise ValueError(f"fairseq-{command} was killed by {name}; {fix} the command")
    if process.returncode:
        end = "".join(last).rstrip()
        raise ValueError(f"fairseq-{command} failed (status {process.returncode}). Its last lines:\n{end}")


def end_with_this_process() -> str:
    """Return Python code that a child process runs, so that Linux kills the child as soon as this process ends."""
    return f"""import ctypes, os
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {signal.SIGKILL.value})  # PR_SET_PDEATHSIG
if os.getppid() != {os.getpid()}:
    sys.exit()
"""


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replace a closed standard input or error stream with /dev/null, and handle errors of the standard output.

    If the reader of the output has exited (``| head``), the program ends by SIGPIPE, as usual.

    Raises:
        SystemExit: the standard output is closed, or writing to it fails.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # otherwise, the next opened file would get this stream's descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (open until the process ends)
    if sys.stdout is None:
        sys.exit("fairseq-plugins: error: the standard output is closed; redirect it to a file")
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
    """Return whether an error is a failed write to the standard output; such an error names no file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE


def _end_by_output(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    # Without this redirection, Python would flush the standard output again at exit and print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(f"fairseq-plugins: error: cannot write to the standard output: {error.strerror}")
