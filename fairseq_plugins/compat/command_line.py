"""What fairseq makes of a command line."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
from collections.abc import Callable
from typing import Any

from fairseq import options, utils

from fairseq_plugins.compat.refusals import command_of, refuse
from fairseq_plugins.compat.wrapping import in_place_of

__all__ = ["understand_command_lines"]


def understand_command_lines() -> None:
    """One wrapper of what reads them.

    ``--arch convs2s --help`` shows fairseq's options and not the model's: the first of two passes answers it, and here
    the second.  ``--bf16`` is taken for a wish to train on a TPU, also where there is no software for one, and fails.
    fairseq-validate without ``--task`` fails by KeyError: None, and fairseq-train without ``--arch`` by a RuntimeError
    that says nothing.  And options that the command cannot do are refused.
    """
    parse = options.parse_args_and_arch
    answer_later = answers_help_too_early(parse)
    no_tpu = getattr(utils, "xm", None) is None and takes_bfloat16_for_a_tpu(parse)

    @in_place_of(options, "parse_args_and_arch")
    def parse_args_and_arch(parser: Any, input_args: Any = None, *more: Any, **others: Any) -> Any:
        given = sys.argv[1:] if input_args is None else input_args
        if answer_later and {"-h", "--help"}.intersection(given):
            passes = itertools.count(1)

            def answer(parser: argparse.ArgumentParser) -> None:
                if next(passes) == 2:
                    parser.parse_args(["--help"])

            given = [word for word in given if word not in ("-h", "--help")]
            return parse(parser, given, modify_parser=answer)
        try:
            parsed = parse(parser, input_args, *more, **others)
        except KeyError as error:
            if error.args != (None,):
                raise
            raise ValueError("--task is missing; give that of the training, such as translation") from None
        except RuntimeError as error:
            if error.args:
                raise
            raise ValueError("--arch is missing; give an architecture, such as convs2s") from None
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if no_tpu:
            args.tpu = "--tpu" in given
        refuse(command_of(args), args)
        return parsed


def answers_help_too_early(parse: Callable[..., Any]) -> bool:
    """Probe: whether ``parse`` shows its help before it has added the options of model, task and criterion."""
    times: list[object] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        parse(argparse.ArgumentParser(), ["--help"], modify_parser=times.append)
    return len(times) < 2  # it lets the parser be modified before and after


def takes_bfloat16_for_a_tpu(parse: Callable[..., Any]) -> bool:
    """Probe: whether ``parse`` makes ``--tpu`` of ``--bf16``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size")
    for option in ("--bf16", "--fp16"):
        parser.add_argument(option, action="store_true")
    return bool(parse(parser, ["--bf16"]).tpu)
