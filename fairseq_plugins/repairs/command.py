"""fairseq's commands: their options, errors, memory and messages."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Any

from fairseq import options, utils
from omegaconf import DictConfig

from fairseq_plugins.repairs.refusals import command_of, refuse
from fairseq_plugins.repairs.wrapping import programs, wrap

logger = logging.getLogger(__name__)

# Users cannot act on these warnings about fairseq's use of hydra and torch.
_WARNINGS = (
    r"hydra\.experimental\.\w+\(\) is no longer experimental",
    r"\s*The version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema",
    r"\s*The strict flag in the compose API is deprecated",
    r"'pin_memory' argument is set as true but no accelerator is found",
)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MEMORY_SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


@wrap(options, "parse_args_and_arch")
def parse_command_lines(parse: Any, parser: Any, input_args: Any = None, *more: Any, **others: Any) -> Any:
    """Check the options of a command line, and repair how fairseq parses them.

    - fairseq parses a command line twice.  The first pass already answers ``--help``, before the options of model, task
      and criterion are known.
    - ``--bf16`` sets ``--tpu``, which fails without TPU software.
    - Without ``--task`` or ``--arch``, fairseq raises an error that does not name the option.
    """
    given = sys.argv[1:] if input_args is None else input_args
    if {"-h", "--help"}.intersection(given):
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
        raise ValueError("--task is missing; give the training's task, such as translation") from None
    except RuntimeError as error:
        if error.args:
            raise
        raise ValueError("--arch is missing; give an architecture, such as convs2s") from None
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(utils, "xm", None) is None:
        args.tpu = "--tpu" in given
    refuse(command_of(args), args)
    return parsed


def print_option_errors_without_traceback() -> None:
    """Print two kinds of errors as one line without a traceback, like argparse.

    The first kind is a ValueError whose message begins with an option.  The second kind is the FloatingPointError that
    fairseq raises if a training diverges.
    """
    print_error = sys.excepthook
    if "fairseq_cli" not in sys.modules:
        return

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = str(error)
        is_floating = issubclass(kind, FloatingPointError)
        if is_floating and message == "gradients are Nan/Inf":
            message = (
                "--lr: the training diverged, because the gradients became NaN or infinite; start again with a longer "
                "--warmup-updates or a lower --lr (or --lr-scale)"
            )
        elif is_floating and "Minimum loss scale reached" in message:  # --fp16 and --amp
            message = f"--lr: the training diverged: {message}"
        elif not (issubclass(kind, ValueError) and re.match(r"--[a-z][\w-]+", message)):
            print_error(kind, error, trace)
            return
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)

    sys.excepthook = excepthook


def keep_freed_memory() -> None:
    """Except in training, keep freed memory in the process, because the system spends time on clearing new pages.

    A training process returns freed memory to the operating system.  Training allocates blocks of many sizes, so
    keeping freed blocks would leave gaps in the heap, and the process would need 1.7 times as much memory.  This
    function does nothing if environment variables configure malloc, or if the C library is not glibc.
    """
    trains = Path(sys.argv[0]).stem.endswith("train")  # fairseq-train, fairseq-hydra-train, fairseq_cli/train.py
    if trains or _MEMORY_SETTINGS & os.environ.keys():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


def limit_cached_products() -> None:
    """Limit two caches of compiled matrix products to 128 shapes instead of 1024; a shape needs 0.25 MB or more.

    The first cache belongs to oneDNN, and the second to ideep, the library through which torch calls oneDNN.  Batches
    rarely repeat a shape.
    """
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & os.environ.keys():
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")


def hide_chatter() -> None:
    """Hide deprecation warnings, and the log lines that ``fairseq-interactive`` prints between translations.

    fairseq logs four lines about batches for each typed line.  At the start, fairseq logs its configuration, which
    fills many screens.
    """
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("hydra.core.utils").setLevel(logging.INFO)
    if programs("interactive"):
        logging.getLogger("fairseq.tasks.fairseq_task").setLevel(logging.WARNING)
        logging.getLogger("fairseq_cli.interactive").addFilter(lambda record: not isinstance(record.msg, DictConfig))


@wrap("generate", "main")
def name_empty_translations(main: Any, cfg: Any) -> Any:
    """Explain why ``fairseq-generate`` skipped all sentences; fairseq stops with a ZeroDivisionError."""
    try:
        return main(cfg)
    except ZeroDivisionError as error:
        if extract_tb(error.__traceback__)[-1].name != "_main":
            raise
        raise ValueError(
            "--gen-subset: no sentence was translated, because all are too long for the model or --max-tokens, "
            "or this shard is empty; raise --max-tokens or use fewer shards"
        ) from None
