"""The standard streams, which a shell may have closed and whose reader may leave."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OF_WRITING = {errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EBADF}


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
        _end(error)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            _end(error)


def is_of_output(error: BaseException) -> bool:
    """Whether an error comes from the standard output: all files that are written are named (`whole_file`)."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITING


def _end(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try again at its end, and print a traceback
    sys.exit(f"fairseq-plugins: error: the standard output was not written: {error.strerror}")
