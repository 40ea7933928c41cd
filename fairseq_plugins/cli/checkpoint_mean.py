"""The mean parameters of several checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from torch import Tensor

FIX = "average checkpoints of one training"


@torch.no_grad()  # parameters that are loaded from a file require gradients
def write_mean(paths: Sequence[Path], output: Path) -> None:
    """Write a checkpoint with the mean parameters and the rest of the last checkpoint, but without optimizer state.

    Raises:
        ValueError: a checkpoint is unreadable, or the models differ.
    """
    first = state = load(paths[0])
    total = {  # float64 avoids rounding in the sum
        name: value.to(torch.float64, copy=True) for name, value in state["model"].items() if is_averaged(name, value)
    }
    for path in paths[1:]:
        state = load(path)
        check_same_model(paths[0], first, path, state)
        for name in total:
            total[name] += state["model"][name].double()
    means = {name: (value / len(paths)).to(state["model"][name].dtype) for name, value in total.items()}
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
    """Load a checkpoint as data.

    Raises:
        ValueError: the file is not a checkpoint of fairseq.
    """
    state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if architecture(state) is None:
        raise ValueError(f"{path} has no architecture: give a checkpoint of fairseq-train")
    return state


def architecture(state: Mapping[str, Any]) -> Any:
    """Return the name of the architecture, or None."""
    try:
        return state["cfg"].model._name
    except Exception:  # a file can cause any error
        return None


def is_averaged(name: str, value: Tensor) -> bool:
    """Return whether an entry is averaged: all parameters are; version numbers are not, even as floats."""
    return value.is_floating_point() and not name.endswith("version")


def check_same_model(first_path: Path, first: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    """Refuse checkpoints that differ in architecture, dictionary, parameters or parameter layout.

    Raises:
        ValueError: the checkpoints differ; the error names the difference.
    """
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
        raise ValueError(f"{places} have different parameters, only one has {odd[0]}; {FIX}")
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape:
            sizes = f"{list(value.shape)} and {list(other.shape)}"
            raise ValueError(f"{places} differ in the size of {name}, {sizes}; {FIX}")
        if not is_averaged(name, value) and not torch.equal(value, other):
            raise ValueError(f"{places} differ in {name}, {value} and {other}; {FIX}")
