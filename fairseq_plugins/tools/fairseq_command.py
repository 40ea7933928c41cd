"""fairseq's commands, shown as one would type them, and run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["fairseq", "fairseq_lines"]

# As `python -m`, which looks for modules in the working folder first: there may be a sacrebleu.py among the texts. The
# option against it, -P, came with Python 3.11.
RUN = """import sys
sys.path[:] = filter(None, sys.path)
import runpy
runpy.run_module("fairseq_cli.{}", run_name="__main__", alter_sys=True)
"""


def fairseq(command: str, *options: object) -> None:
    """Run ``fairseq-COMMAND``, its output to stderr.

    Raises:
        ValueError: it fails.
    """
    for line in fairseq_lines(command, *options):
        print(line, end="", file=sys.stderr, flush=True)


def fairseq_lines(command: str, *options: object, stdin: int | None = subprocess.DEVNULL) -> Iterator[str]:
    """Run ``fairseq-COMMAND`` and give what it prints, line by line.

    Raises:
        ValueError: it fails.
    """
    words = [str(option) for option in options]
    print(f"\n$ {shlex.join([f'fairseq-{command}', *words])}", file=sys.stderr, flush=True)
    # fairseq uses its libraries in ways that they have come to warn of.
    call = [sys.executable, "-u", "-W", "ignore", "-c", RUN.format(command.replace("-", "_")), *words]
    # The processes that it starts itself look nowhere else either, from Python 3.11 on.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        call, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "{'_name'" not in line:  # the whole configuration, many screens long
                yield line
    if process.returncode:
        raise ValueError(f"fairseq-{command} failed (status {process.returncode}); its last lines say why")
