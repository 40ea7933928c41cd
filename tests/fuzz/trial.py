"""Try inputs with limits of time and memory, and watch the code that Python runs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

SECONDS = 5.0  # of a processor, for one input
MEBIBYTES = 256
INPUTS = os.environ.get("FUZZ_INPUTS")

# Python's audit events of what runs or reaches out: https://docs.python.org/3/library/audit_events.html
RUNS = ("exec", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "ctypes.dlopen", "socket")
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
watching: list[list[str]] = []  # of audit events, while an input is read


def fuzz(run: Callable[[Random], None]) -> None:
    """Run a test with many sources of random inputs: the same thousand, or FUZZ_INPUTS= new ones.

    hypothesis would take ten times as long to make an input as most readers to read it.
    """
    for seed in range(1000) if INPUTS is None else (SystemRandom().getrandbits(64) for _ in range(int(INPUTS))):
        try:
            run(Random(seed))
        except BaseException:
            print(f"the input of Random({seed})")
            raise


def importing(file: str) -> bool:
    """Return whether code of a file belongs to an installed module that is imported now, or was made by one."""
    if not file.startswith("<"):
        return file.startswith(INSTALLED)
    frame = sys._getframe()
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event.startswith(RUNS) and not (event == "exec" and importing(arguments[0].co_filename)):
        watching[-1].append(f"{event} {arguments[0]}")


sys.addaudithook(note)


class TooSlow(BaseException):
    """An exception that no reader catches."""


def stop(*_: object) -> None:
    raise TooSlow


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Stop an endless reader."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns of odd literals
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def memory(field: str) -> int:
    """Return the memory of this process in MiB: VmRSS now, or VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) >> 10


class Trial:
    """Call one reader with many inputs.

    Args:
        call: the reader.
        documented: the errors that it may end with.
    """

    def __init__(self, call: Callable[..., Any], *documented: type[Exception]) -> None:
        self.call, self.documented = call, documented

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of the call, or None after a documented error."""
        ran: list[str] = []
        Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is forgotten
        used = memory("VmRSS")
        watching.append(ran)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        start = time.process_time()
        try:
            result = self.call(*arguments)
        except self.documented:
            result = None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            watching.pop()
        assert time.process_time() - start < SECONDS
        assert not ran, ran
        assert memory("VmHWM") - used < MEBIBYTES
        return result
