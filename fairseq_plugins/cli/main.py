"""``fairseq-plugins``: the command line of this plugin."""

from __future__ import annotations

import importlib
import io
import logging
import os
import pickle
import re
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

from fairseq_plugins import __version__
from fairseq_plugins.cli.processes import is_of_output, standard_streams, stoppable

# Module in this package and help text of each command.
COMMANDS = {
    "user-dir": ("user_dir", "print the path for fairseq's --user-dir"),
    "import-fconv": ("import_fconv", "convert a checkpoint of fairseq's fconv to convs2s"),
    "own-data": ("own_data.command", "train a model on your own parallel text, and translate with it"),
    "export": ("export", "write a folder that translates without fairseq and PyTorch"),
    "serve": ("serve.command", "translate over HTTP and on a web page, with exported folders"),
    "average": ("average", "average the checkpoints of a training"),
    "lexicon": ("lexicon", "extract a bilingual lexicon from parallel text"),
    "plot-attention": ("plot_attention", "draw the attention of a translation"),
    "plot-branches": ("plot_branches", "draw how a Weighted Transformer's branch weights change during training"),
    "plot-loss": ("plot_loss", "draw the losses in fairseq's logs"),
    "score": ("score", "print BLEU, chrF or ROUGE of translations"),
    "tune-length": ("tune_length", "find the best length penalty for n-best lists, without decoding again"),
}


def find(name: str) -> ModuleType:
    """Import a command's module, which has the functions ``add_arguments(parser)`` and ``run(args)``."""
    return importlib.import_module(f"fairseq_plugins.cli.{COMMANDS[name][0]}")


@stoppable()
@standard_streams()
def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    The functions of commands raise ValueError or OSError for user errors; most of their docstrings do not list these.
    `main` prints a user error on one line and exits with status 1.
    """
    # During its import, fairseq logs that text_to_speech needs tensorboardX, which this plugin does not need.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Escape characters that the stream cannot encode.
    try:
        args.run(args)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        if is_of_output(error):
            raise
        message = re.sub(r"\[Errno -?\d+\] ", "", str(error))
        sys.exit(f"fairseq-plugins {args.command}: error: {message}")


def parse(words: list[str]) -> Namespace:
    """Parse a command line; the result's attribute ``run`` is the command's function."""
    parser = ArgumentParser(
        prog="fairseq-plugins", description="Tools around the translation models of fairseq_plugins."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # hide subword-nmt's progress bar
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        # Only the given command is imported: importing all commands, with torch and fairseq, would take seconds.
        if words[:1] == [name]:
            tool = find(name)
            command.description = tool.__doc__
            tool.add_arguments(command)
            command.set_defaults(command=name, run=tool.run)
            # A user may put options between SOURCE, TARGET and OUT, and may omit TARGET.
            return command.parse_intermixed_args(words[1:])
    return parser.parse_args(words)
