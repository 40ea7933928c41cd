"""Convert a checkpoint of fairseq's fconv to convs2s; the translations stay the same."""

from __future__ import annotations

import importlib
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir
from fairseq_plugins.common.files import naming_file_in_errors, refuse_existing


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.pt", help="fconv checkpoint of any fairseq version")
    parser.add_argument("output", type=Path, metavar="OUT.pt", help="convs2s checkpoint to write")
    add_user_dir(parser)


def run(args: Namespace) -> None:
    """Convert one checkpoint."""
    if not args.input.is_file():
        raise ValueError(f"{args.input} is not a file: give a checkpoint of fairseq's fconv")
    refuse_existing(args.output)
    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    from fairseq import checkpoint_utils

    family = find_converter("fconv")
    with naming_file_in_errors(args.input, "cannot be converted from fairseq's fconv"):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(args.input))
        try:
            converted = family.convert(state)
        except ValueError as error:  # about the contents
            raise ValueError(f"{args.input}: {error}") from error
    checkpoint_utils.torch_persistent_save(converted, str(args.output))
    path = shlex.quote(str(args.output))
    print(f'{args.output}: translate with fairseq-generate --user-dir "$(fairseq-plugins user-dir)" --path {path}')


def find_converter(model: str) -> ModuleType:
    """Import the module that converts checkpoints of a fairseq model to one of this plugin's model families."""
    from fairseq.models import MODEL_REGISTRY

    for family in MODEL_REGISTRY.values():
        if name := getattr(family, "converters", {}).get(model):
            return importlib.import_module(name)
    raise ValueError(f"import-{model}: no model family converts {model}; reinstall the plugin, including convs2s")
