"""``fairseq-plugins``: what users need beside fairseq's own commands."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

from fairseq_plugins import __version__
from fairseq_plugins.cli.processes import is_of_output, standard_streams, stoppable

# For each command its module in this package, and its help.
COMMANDS = {
    "user-dir": ("user_dir", "print the path to give to fairseq's --user-dir"),
    "import-fconv": ("import_fconv", "turn a checkpoint of fairseq's fconv into one of convs2s"),
    "prepare": ("prepare.command", "prepare the data of an experiment of the papers"),
    "own-data": ("own_data.command", "prepare, train and translate: from two text files to translations"),
    "export": ("export", "write a folder that translates without fairseq and torch"),
    "serve": ("serve.command", "translate over HTTP with exported folders, and on a page"),
    "average": ("average", "write the mean of several checkpoints of a training"),
    "lexicon": ("lexicon", "find the translations of each source word in a parallel text"),
    "plot-attention": ("plots.attention", "draw the attention of a translation"),
    "plot-branches": ("plots.branches", "draw how the branches' weights of a Weighted Transformer develop"),
    "plot-loss": ("plots.loss", "draw the losses of trainings from fairseq's logs"),
    "score": ("score", "print BLEU or ROUGE of translations"),
    "tune-length": ("tune_length", "find the best length penalty for n-best lists, without decoding again"),
}


def find(name: str) -> ModuleType:
    """Import the module of a command, which has ``add_arguments(parser)`` and ``run(args)``."""
    return importlib.import_module(f"fairseq_plugins.cli.{COMMANDS[name][0]}")


@stoppable()
@standard_streams()
def main(arguments: list[str] | None = None) -> None:
    """The command line; errors in what the user gave end it with one line and status 1."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that its encoding has not
    try:
        args.run(args)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        if is_of_output(error):
            raise
        message = re.sub(r"\[Errno -?\d+\] ", "", str(error))  # without the system's number for it
        sys.exit(f"fairseq-plugins {args.command}: error: {message}")


def parse(words: list[str]) -> Namespace:
    """The arguments of a command, and its ``run``."""
    parser = ArgumentParser(
        prog="fairseq-plugins", description="Tools around the translation models of fairseq_plugins."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # for subword-nmt's bar, which asks for no terminal
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if words[:1] == [name]:  # the others are not imported: with torch and fairseq that takes seconds
            tool = find(name)
            command.description = tool.__doc__
            tool.add_arguments(command)
            command.set_defaults(command=name, run=tool.run)
            # Options may stand between SOURCE, TARGET and OUT, of which one may be missing.
            return command.parse_intermixed_args(words[1:])
    return parser.parse_args(words)
