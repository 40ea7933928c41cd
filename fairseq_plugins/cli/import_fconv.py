"""``fairseq-plugins import-fconv``: a convs2s checkpoint from one of fairseq's fconv."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, refuse_existing, refuse_missing_folder


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.pt", help="checkpoint of a fairseq fconv model, of any age")
    parser.add_argument("output", type=Path, metavar="OUT.pt", help="where to write the convs2s checkpoint")
    add_user_dir(parser)


def run(args: Namespace) -> None:
    """Convert one checkpoint.

    Raises:
        ValueError: the input is missing or no fconv checkpoint, or the output exists already or cannot be written.
        OSError: a file cannot be read or written.
        UnpicklingError: the input is no checkpoint, or holds more than data.
    """
    if not args.input.is_file():
        raise ValueError(f"there is no file {args.input}")
    refuse_existing(args.output)
    refuse_missing_folder(args.output)
    from fairseq_plugins.cli.fconv_checkpoint import convert_file  # noqa: PLC0415  (with torch and fairseq: seconds)

    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    convert_file(args.input, args.output)
    path = shlex.quote(str(args.output))
    print(f'{args.output}: translate with fairseq-generate --user-dir "$(fairseq-plugins user-dir)" --path {path}')
