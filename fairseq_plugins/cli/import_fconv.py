"""``fairseq-plugins import-fconv``: a convs2s checkpoint from one of fairseq's fconv."""

from __future__ import annotations

import importlib
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import fairseq_plugins
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir
from fairseq_plugins.cli.files import blaming, refuse_existing, refuse_missing_folder


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
    fairseq_plugins.install()
    import_user_dir(args.user_dir)
    from fairseq import checkpoint_utils  # noqa: PLC0415  (with torch: seconds)

    family = find_converter("fconv")
    with blaming(args.input, "cannot be converted from fairseq's fconv"):
        converted = family.convert(checkpoint_utils.load_checkpoint_to_cpu(str(args.input)))
    checkpoint_utils.torch_persistent_save(converted, str(args.output))
    path = shlex.quote(str(args.output))
    print(f'{args.output}: translate with fairseq-generate --user-dir "$(fairseq-plugins user-dir)" --path {path}')


def find_converter(model: str) -> ModuleType:
    """Import the module of the family that converts checkpoints of a model of fairseq.

    Raises:
        ValueError: there is no such family.
    """
    from fairseq.models import MODEL_REGISTRY  # noqa: PLC0415  (with torch: seconds)

    for family in MODEL_REGISTRY.values():
        if name := getattr(family, "converters", {}).get(model):
            return importlib.import_module(name)
    raise ValueError(f"import-{model} needs a family that converts {model}: fairseq_plugins/convs2s is missing")
