"""``fairseq-plugins``: what users need beside fairseq's own commands."""

from __future__ import annotations

import io
import pickle
import sys
from argparse import ArgumentParser

from fairseq_plugins.tools import (
    average,
    export_nbest,
    import_fconv,
    lexicon,
    own_data,
    plot_attention,
    plot_branches,
    plot_loss,
    prepare,
    score,
    tune_length,
    tune_offset,
    user_dir,
)

__all__ = ["main"]

_COMMANDS = {
    "user-dir": (user_dir, "print the path to give to fairseq's --user-dir"),
    "import-fconv": (import_fconv, "turn a checkpoint of fairseq's fconv into one of convs2s"),
    "prepare": (prepare, "prepare the data of an experiment of the papers"),
    "own-data": (own_data, "prepare, train and translate: from two text files to translations"),
    "average": (average, "write the mean of several checkpoints of a training"),
    "lexicon": (lexicon, "find the translations of each source word in a parallel text"),
    "plot-attention": (plot_attention, "draw what a translation attends to"),
    "plot-branches": (plot_branches, "draw how the branches' weights of a Weighted Transformer develop"),
    "plot-loss": (plot_loss, "draw the losses of trainings, out of fairseq's logs"),
    "score": (score, "print BLEU or ROUGE of translations"),
    "tune-length": (tune_length, "find the best length penalty for n-best lists, without decoding again"),
    "tune-offset": (tune_offset, "find where to look for what an unknown word stands for"),
    "export-nbest": (export_nbest, "write n-best lists in the format of Moses"),
}


def main(arguments: list[str] | None = None) -> None:
    """The command line; errors in what the user gave end it with one line and status 1."""
    parser = ArgumentParser(
        prog="fairseq-plugins", description="Tools around the translation models of fairseq_plugins."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (tool, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=tool.__doc__)
        tool.add_arguments(command)
        command.set_defaults(run=tool.run)
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that its encoding has not
    try:
        args.run(args)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        sys.exit(f"fairseq-plugins {args.command}: error: {error}")
