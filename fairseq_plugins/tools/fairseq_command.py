"""fairseq's commands, shown as one would type them, and run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["fairseq", "fairseq_lines"]


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
    call = [sys.executable, "-u", "-W", "ignore", "-m", f"fairseq_cli.{command.replace('-', '_')}", *words]
    with subprocess.Popen(
        call, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "{'_name'" not in line:  # the whole configuration, many screens long
                yield line
    if process.returncode:
        raise ValueError(f"fairseq-{command} failed (status {process.returncode}); its last lines say why")
