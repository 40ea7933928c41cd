"""The convs2s checkpoint that a checkpoint of fairseq's fconv becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf, open_dict

from fairseq_plugins.cli.any_file import blaming
from fairseq_plugins.common.options import architecture
from fairseq_plugins.convs2s.fconv import convert_options, convert_parameters


def convert_file(path: Path, output: Path) -> None:
    """Write the converted checkpoint.

    Raises:
        ValueError: the file holds no fconv model.
        OSError: a file cannot be read or written.
        UnpicklingError: the file is no checkpoint, or holds more than data.
    """
    with blaming(path, "cannot be converted from fairseq's fconv"):
        converted = convert(checkpoint_utils.load_checkpoint_to_cpu(str(path)))
    checkpoint_utils.torch_persistent_save(converted, str(output))


def convert(state: dict[str, Any]) -> dict[str, Any]:
    """The convs2s checkpoint that an fconv checkpoint becomes.

    Raises:
        ValueError: it holds another model, or parameters that are none of fconv's.
    """
    cfg = state["cfg"]
    options = cfg.model
    name = architecture(options)
    family = ARCH_MODEL_NAME_REGISTRY.get(name, "unknown")
    if family != "fconv":
        raise ValueError(
            f"the checkpoint holds {name!r}, of the family {family}, and not one of fairseq's fconv; an "
            "architecture of your own wants --user-dir"
        )
    ARCH_CONFIG_REGISTRY[name](options)  # old checkpoints leave out what was the architecture's default
    with open_dict(cfg):
        cfg.model = convert_options(options, state["model"])
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, enum_to_str=True),
        "model": convert_parameters(state["model"]),
        "criterion": None,
        "optimizer_history": state["optimizer_history"],
        "task_state": state.get("task_state", {}),
        "extra_state": state["extra_state"],
        # The optimizer's state is left behind: it lists parameters in fconv's order.
        "last_optimizer_state": None,
    }
