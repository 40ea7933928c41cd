"""Errors of options as fairseq's commands print them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType


def print_errors_of_options_alone() -> None:
    """End a command with one line, as argparse does, at a ValueError that begins with an option such as ``--lr``.

    A traceback would hide that line.  There is no probe: fairseq leaves every error to Python.
    """
    print_error = sys.excepthook
    if "fairseq_cli" not in sys.modules:
        return

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ValueError) and re.match(r"--[a-z][\w-]+", str(error)):
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        else:
            print_error(kind, error, trace)

    sys.excepthook = excepthook
