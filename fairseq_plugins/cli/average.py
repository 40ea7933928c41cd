"""Average the parameters of several checkpoints of a training.

INPUT is a list of checkpoints, or with --last N the folder of a training.  --last averages the checkpoints of the last
N epochs (checkpoint7.pt), or with --updates the last N checkpoints of --save-interval-updates (checkpoint_2_5000.pt).
All checkpoints must have the same version of the parameter layout.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import fairseq_plugins
from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.cli.files import refuse_existing, refuse_missing_folder, refuse_unreadable

BY_EPOCH, BY_UPDATES = re.compile(r"checkpoint(\d+)\.pt"), re.compile(r"checkpoint_\d+_(\d+)\.pt")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "input", nargs="+", type=Path, metavar="INPUT", help="checkpoints, or the folder of a training with --last"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write")
    parser.add_argument("--last", type=positive, metavar="N", help="average the last N checkpoints of the folder")
    parser.add_argument(
        "--updates",
        action="store_true",
        help="with --last: use checkpoints of --save-interval-updates instead of those of epochs",
    )


def run(args: Namespace) -> None:
    """Average the parameters; copy the rest of the last checkpoint, except the optimizer state.

    Raises:
        ValueError: there are too few checkpoints, one is unreadable, their models differ, or the output is not allowed.
    """
    refuse_existing(args.output)
    refuse_missing_folder(args.output)
    if args.last is None and args.updates:
        raise ValueError("--updates needs --last N")
    paths = args.input if args.last is None else last_checkpoints(args.input, args.last, args.updates)
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give --last N to average its last N checkpoints")
    refuse_unreadable(*paths)
    from fairseq_plugins.cli.checkpoint_mean import write_mean  # noqa: PLC0415  (importing fairseq takes seconds)

    fairseq_plugins.install()
    write_mean(paths, args.output)
    print(f"{args.output}: average of\n" + "\n".join(f"  {path}" for path in paths))


def last_checkpoints(folders: Sequence[Path], count: int, updates: bool) -> list[Path]:
    """Return the last checkpoints of a folder, oldest first.

    Raises:
        ValueError: there is not exactly one folder, or it has too few checkpoints.
    """
    if len(folders) != 1 or not folders[0].is_dir():
        got = folders[0] if len(folders) == 1 else f"{len(folders)} paths"
        raise ValueError(f"--last needs exactly one folder as INPUT, got {got}")
    pattern = BY_UPDATES if updates else BY_EPOCH
    found = {int(match[1]): path for path in folders[0].iterdir() if (match := pattern.fullmatch(path.name))}
    if len(found) < count:
        kind = "--save-interval-updates" if updates else "epochs"
        raise ValueError(
            f"--last {count}: {folders[0]} has {len(found)} checkpoints of {kind}; own-data keeps more with "
            f"--train '--save-interval-updates 500 --keep-interval-updates {count}' (in OUT/ARCH, then use --updates)"
        )
    return [found[number] for number in sorted(found)[-count:]]
