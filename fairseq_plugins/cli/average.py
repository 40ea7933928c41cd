"""Average the parameters of several checkpoints of one training.

INPUT is a list of checkpoints or, if --last is given, the folder of a training.  --last N averages the checkpoints of
the last N epochs (checkpoint7.pt).  --last N --updates averages the last N checkpoints that --save-interval-updates
saved (checkpoint_2_5000.pt).
All checkpoints must have the same version of the parameter layout.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fairseq_plugins
from fairseq_plugins.cli.arguments import positive
from fairseq_plugins.common.files import refuse_existing

if TYPE_CHECKING:
    from torch import Tensor

BY_EPOCH, BY_UPDATES = re.compile(r"checkpoint(\d+)\.pt"), re.compile(r"checkpoint_\d+_(\d+)\.pt")
FIX = "average checkpoints of one training"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "input", nargs="+", type=Path, metavar="INPUT", help="checkpoints; with --last, the folder of a training"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write")
    parser.add_argument("--last", type=positive, metavar="N", help="average the last N checkpoints in the folder INPUT")
    parser.add_argument(
        "--updates",
        action="store_true",
        help="with --last: use checkpoints of --save-interval-updates instead of checkpoints of epochs",
    )


def run(args: Namespace) -> None:
    """Average the parameters; copy the rest of the last checkpoint, except the optimizer state."""
    refuse_existing(args.output)
    if args.last is None and args.updates:
        raise ValueError("--updates: no effect without --last; add --last N")
    paths = args.input if args.last is None else last_checkpoints(args.input, args.last, args.updates)
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give --last N to average its last N checkpoints")
        path.stat()  # a missing file is reported before the slow imports
    fairseq_plugins.install()
    write_mean(paths, args.output)
    print(f"{args.output}: average of\n" + "\n".join(f"  {path}" for path in paths))


def last_checkpoints(folders: Sequence[Path], count: int, updates: bool) -> list[Path]:
    """Return the last checkpoints of a folder, oldest first."""
    if len(folders) != 1 or not folders[0].is_dir():
        got = folders[0] if len(folders) == 1 else f"{len(folders)} paths"
        raise ValueError(f"--last needs exactly one folder as INPUT, got {got}")
    found = numbered_checkpoints(folders[0], BY_UPDATES if updates else BY_EPOCH)
    if len(found) < count:
        kind, keep = "epochs", f"--keep-last-epochs {count}"
        if updates:
            kind, keep = "--save-interval-updates", f"--save-interval-updates 500 --keep-interval-updates {count}"
        raise ValueError(
            f"--last {count}: {folders[0]} has {len(found)} checkpoints of {kind}; to keep more, train with {keep}"
        )
    return found[-count:]


def numbered_checkpoints(folder: Path, pattern: re.Pattern[str] = BY_EPOCH) -> list[Path]:
    """Return the checkpoints of a folder that are named by epochs (or updates), oldest first."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def write_mean(paths: Sequence[Path], output: Path) -> None:
    """Write a checkpoint with the mean parameters and the rest of the last checkpoint, but without optimizer state."""
    from fairseq import checkpoint_utils
    from omegaconf import OmegaConf

    first = state = load(paths[0])
    # Double precision avoids rounding in the sum. Loaded parameters require gradients, so they are detached.
    total = {
        name: value.detach().double().clone() for name, value in state["model"].items() if is_averaged(name, value)
    }
    for path in paths[1:]:
        state = load(path)
        check_same_model(paths[0], first, path, state)
        for name in total:
            total[name] += state["model"][name].detach().double()
    means = {name: (value / len(paths)).to(state["model"][name].dtype) for name, value in total.items()}
    # The last checkpoint's moving average (EMA) is dropped, because it does not match the mean parameters.
    extra = {name: value for name, value in (state.get("extra_state") or {}).items() if not name.startswith("ema")}
    averaged = {
        **state,
        "args": None,
        "cfg": OmegaConf.to_container(state["cfg"], enum_to_str=True),
        "model": {**state["model"], **means},
        "last_optimizer_state": None,
        "extra_state": extra,
    }
    checkpoint_utils.torch_persistent_save(averaged, str(output))


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint, and check that it names an architecture."""
    from fairseq import checkpoint_utils

    state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if architecture(state) is None:
        raise ValueError(f"{path} has no architecture: give a checkpoint of fairseq-train")
    return state


def architecture(state: Mapping[str, Any]) -> Any:
    """Return the name of the architecture, or None."""
    try:
        return state["cfg"].model._name
    except Exception:  # a malformed checkpoint can raise any exception
        return None


def is_averaged(name: str, value: Tensor) -> bool:
    """Return whether a tensor of the checkpoint is averaged: floating-point tensors are, version numbers are not."""
    return value.is_floating_point() and not name.endswith("version")


def check_same_model(first_path: Path, first: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    """Refuse checkpoints that differ in architecture, dictionary, parameters or parameter layout."""
    places = f"{first_path} and {path}"
    names = [architecture(each) for each in (first, state)]
    if names[0] != names[1]:
        raise ValueError(f"{places} have different architectures, {names[0]} and {names[1]}; {FIX}")
    constraints = [getattr(each["cfg"].model, "branch_constraint", None) for each in (first, state)]
    if constraints[0] != constraints[1]:
        raise ValueError(f"{places} differ in --branch-constraint, {constraints[0]} and {constraints[1]}; {FIX}")
    words = [(each.get("extra_state") or {}).get("words") for each in (first, state)]
    if None not in words and words[0] != words[1]:
        raise ValueError(f"{places} have different dictionaries; {FIX}")
    ours, theirs = first["model"], state["model"]
    if odd := sorted(ours.keys() ^ theirs.keys()):
        raise ValueError(f"{places} have different parameters: only one checkpoint contains {odd[0]}; {FIX}")
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape:
            sizes = f"{list(value.shape)} and {list(other.shape)}"
            raise ValueError(f"{places} differ in the size of {name}, {sizes}; {FIX}")
        if not is_averaged(name, value) and not value.equal(other):
            raise ValueError(f"{places} differ in {name}, {value} and {other}; {FIX}")
