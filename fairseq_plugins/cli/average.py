"""``fairseq-plugins average``: one checkpoint with the mean of several ones' parameters.

They are named, or found in a training's folder: the last N that fairseq wrote after an epoch (``checkpoint7.pt``) or,
with ``--updates``, after so many updates (``checkpoint_2_5000.pt``).  What is not a number of the model but says how it
is laid out (``version``) must be the same in all, and is kept; a mean of points of the simplex is one.
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
        "input", nargs="+", type=Path, metavar="INPUT", help="checkpoints, or with --last the folder of a training"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write")
    parser.add_argument("--last", type=positive, metavar="N", help="average the last N checkpoints of the folder")
    parser.add_argument(
        "--updates", action="store_true", help="with --last: those of --save-interval-updates, not of epochs"
    )


def run(args: Namespace) -> None:
    """Average; everything but the parameters comes from the last checkpoint, without the optimizer's state.

    Raises:
        ValueError: there are too few checkpoints, one cannot be read, they differ in kind, or the output exists or has
            no folder.
    """
    refuse_existing(args.output)
    refuse_missing_folder(args.output)
    if args.last is None and args.updates:
        raise ValueError("--updates goes with --last")
    paths = args.input if args.last is None else last_checkpoints(args.input, args.last, args.updates)
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: its last N checkpoints are taken with --last N")
    refuse_unreadable(*paths)
    from fairseq_plugins.cli.checkpoint_mean import write_mean  # noqa: PLC0415  (with torch and fairseq: seconds)

    fairseq_plugins.install()
    write_mean(paths, args.output)
    print(f"{args.output}: the mean of\n" + "\n".join(f"  {path}" for path in paths))


def last_checkpoints(folders: Sequence[Path], count: int, updates: bool) -> list[Path]:
    """The last checkpoints of a folder, the oldest first.

    Raises:
        ValueError: there is not one folder, or fewer checkpoints.
    """
    if len(folders) != 1 or not folders[0].is_dir():
        raise ValueError("--last takes one folder")
    pattern = BY_UPDATES if updates else BY_EPOCH
    found = {int(match[1]): path for path in folders[0].iterdir() if (match := pattern.fullmatch(path.name))}
    if len(found) < count:
        kind = "updates" if updates else "an epoch"
        raise ValueError(
            f"{folders[0]} has {len(found)} checkpoints that were saved after {kind}, not {count} (own-data trains in "
            "OUT/ARCH and keeps the best and the last one; for more, with --updates, train with --train "
            f"'--save-interval-updates 500 --keep-interval-updates {count}')"
        )
    return [found[number] for number in sorted(found)[-count:]]
