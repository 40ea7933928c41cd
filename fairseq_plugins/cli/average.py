"""``fairseq-plugins average``: one checkpoint with the mean of several ones' parameters.

They are named, or found in a training's folder: the last N that fairseq wrote after an epoch (``checkpoint7.pt``) or,
with ``--updates``, after so many updates (``checkpoint_2_5000.pt``).  What is not a number of the model but says how it
is laid out (``version``) must be the same in all, and is kept; a mean of points of the simplex is one.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_plugins
from fairseq_plugins.cli.any_file import blaming
from fairseq_plugins.cli.arguments import positive, refuse_existing

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
    fairseq_plugins.install()
    refuse_existing(args.output)
    if not args.output.parent.is_dir():
        raise ValueError(f"{args.output.parent} is no folder to write {args.output.name} to")
    if args.last is None and args.updates:
        raise ValueError("--updates goes with --last")
    paths = args.input if args.last is None else last_checkpoints(args.input, args.last, args.updates)
    with blaming(paths[-1], "and those before it cannot be averaged"):
        averaged = mean(paths)
    checkpoint_utils.torch_persistent_save(averaged, str(args.output))
    print(f"{args.output}: the mean of\n" + "\n".join(f"  {path}" for path in paths))


@torch.no_grad()  # else what a file holds as parameters cannot be summed
def mean(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the last checkpoint with the mean of all parameters.

    Raises:
        ValueError: a checkpoint cannot be read, or differs from the first in kind.
    """
    first = state = load(paths[0])
    total = {  # in a precision that survives a sum
        name: value.to(torch.float64, copy=True) for name, value in state["model"].items() if is_averaged(name, value)
    }
    for path in paths[1:]:
        state = load(path)
        check_same_model(paths[0], first, path, state)
        for name in total:
            total[name] += state["model"][name].double()
    means = {name: (value / len(paths)).to(state["model"][name].dtype) for name, value in total.items()}
    extra = {name: value for name, value in (state.get("extra_state") or {}).items() if not name.startswith("ema")}
    return {
        **state,
        "args": None,
        "cfg": OmegaConf.to_container(state["cfg"], enum_to_str=True),
        "model": {**state["model"], **means},
        "last_optimizer_state": None,
        "extra_state": extra,
    }


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


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, which can hold data and never code.

    Raises:
        ValueError: it is missing or none of fairseq.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: its last N checkpoints are taken with --last N")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if architecture(state) is None:
        raise ValueError(f"{path} does not say of which architecture it is")
    return state


def architecture(state: Mapping[str, Any]) -> Any:
    """Its name, or None."""
    try:
        return state["cfg"].model._name
    except Exception:  # there is none that a file cannot cause
        return None


def is_averaged(name: str, value: Tensor) -> bool:
    """Whether an entry is of the model's numbers; a version is not, even where it was saved as one."""
    return value.is_floating_point() and not name.endswith("version")


def check_same_model(first_path: Path, first: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    """Refuse what has another architecture, other words or parameters, or another layout or meaning of them.

    Raises:
        ValueError: says in what the two differ.
    """
    places = f"{first_path} and {path}"
    names = [architecture(each) for each in (first, state)]
    if names[0] != names[1]:
        raise ValueError(f"{places} are of different architectures: {names[0]} and {names[1]}")
    constraints = [getattr(each["cfg"].model, "branch_constraint", None) for each in (first, state)]
    if constraints[0] != constraints[1]:
        raise ValueError(f"{places} differ in --branch-constraint: {constraints[0]} and {constraints[1]}")
    words = [(each.get("extra_state") or {}).get("words") for each in (first, state)]
    if None not in words and words[0] != words[1]:
        raise ValueError(f"{places} were trained with other words")
    ours, theirs = first["model"], state["model"]
    if odd := sorted(ours.keys() ^ theirs.keys()):
        raise ValueError(f"{places} have different parameters: only one has {odd[0]}")
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape:
            raise ValueError(f"{places} differ in the size of {name}: {list(value.shape)} and {list(other.shape)}")
        if not is_averaged(name, value) and not torch.equal(value, other):
            raise ValueError(f"{places} differ in {name}, of which there is no mean: {value} and {other}")
