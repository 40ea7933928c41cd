"""The mean of several checkpoints' parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from torch import Tensor


@torch.no_grad()  # else what a file holds as parameters cannot be summed
def write_mean(paths: Sequence[Path], output: Path) -> None:
    """Write a checkpoint that has the mean parameters, and all else of the last one but the optimizer's state.

    Raises:
        ValueError: one cannot be read, or they differ in kind.
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
    """A checkpoint, which can hold data and never code.

    Raises:
        ValueError: it is none of fairseq.
    """
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
