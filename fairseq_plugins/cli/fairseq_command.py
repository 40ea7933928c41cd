"""fairseq's commands, shown as one would type them, and run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from contextlib import closing

from fairseq_plugins.cli.work import running

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
