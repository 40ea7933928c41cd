"""What fairseq does with the options of a command line or a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import sys
from collections.abc import Callable
from typing import Any

from fairseq import options, utils

from fairseq_plugins.nn.literal import literal

__all__ = ["read_options_without_eval", "show_help_of_all_options"]


def evaluates(read: Callable[[str], Any]) -> bool:
    """Probe: whether ``read`` runs its argument as Python code."""
    try:
        return bool(read("abs(1)"))
    except ValueError:
        return False


def read_options_without_eval() -> None:
    """fairseq evaluates options as Python code: those of its models (``--encoder-layers``), which a checkpoint brings
    along, and of its optimizers (``--adam-betas``).

    The modules that may do so get an ``eval`` that reads literals.
    """
    if not evaluates(utils.eval_bool):
        return
    for name, module in list(sys.modules.items()):
        if name == "fairseq.utils" or name.startswith(("fairseq.models.", "fairseq.optim.")):
            vars(module)["eval"] = literal


def answers_help_too_early(parse: Callable[..., Any]) -> bool:
    """Probe: whether ``parse`` shows its help before it has added the options of model, task and criterion."""
    times: list[object] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        parse(argparse.ArgumentParser(), ["--help"], modify_parser=times.append)
    return len(times) < 2  # it lets the parser be modified before and after


def show_help_of_all_options() -> None:
    """``--arch convs2s --help`` shows fairseq's options and not the model's: the first of two passes answers it.

    It is kept from the first pass, and answered when the second begins.
    """
    parse = options.parse_args_and_arch
    if not answers_help_too_early(parse):
        return

    @functools.wraps(parse)
    def parse_args_and_arch(parser: Any, input_args: Any = None, *more: Any, **others: Any) -> Any:
        given = sys.argv[1:] if input_args is None else input_args
        if not {"-h", "--help"}.intersection(given):
            return parse(parser, input_args, *more, **others)
        passes = itertools.count(1)

        def answer(parser: argparse.ArgumentParser) -> None:
            if next(passes) == 2:
                parser.parse_args(["--help"])

        return parse(parser, [word for word in given if word not in ("-h", "--help")], modify_parser=answer)

    options.parse_args_and_arch = parse_args_and_arch
