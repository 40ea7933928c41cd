"""Convert checkpoints of fairseq's fconv to convs2s.

The two models compute the same function.  fairseq's checkpoints differ in how they hold normalised convolution weights:
``decoder.version`` 2 keeps a magnitude for each output; version 1, or none, keeps one for each kernel position in the
decoder, and may carry a stale ``_linearized_weight`` beside it.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from fairseq_plugins.common.linear import DIRECTION, MAGNITUDE, folded_weight
from fairseq_plugins.common.options import architecture
from fairseq_plugins.convs2s.config import DEFAULTS, ConvS2SConfig
from fairseq_plugins.convs2s.model import ConvS2SModel

_PADDING_IDX = 1  # of every fairseq dictionary

_RENAMED = (
    (r"embed_tokens", "embedding.words"),
    (r"embed_positions", "embedding.positions"),
    (r"fc1", "from_embedding"),
    (r"fc2", "to_embedding"),
    (r"fc3", "output_projection"),
    (r"convolutions\.(\d+)", r"convolutions.\1"),
    (r"attention\.(\d+)\.(in|out)_projection", r"attentions.\1.\2_projection"),
    (r"projections\.(\d+)", r"shortcuts.\1.projection"),
)


def convert(state: dict[str, Any]) -> dict[str, Any]:
    """Return the convs2s checkpoint that an fconv checkpoint becomes.

    Raises:
        ValueError: it holds another model, or a parameter that does not belong to an fconv model.
    """
    cfg = state["cfg"]
    options = cfg.model
    name = architecture(options)
    family = ARCH_MODEL_NAME_REGISTRY.get(name, "unknown")
    if family != "fconv":
        raise ValueError(
            f"the checkpoint holds {name!r}, of the family {family}, and not one of fairseq's fconv; an "
            "architecture of your own needs --user-dir"
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


def convert_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the convs2s model that computes what this fconv computes.

    Args:
        parameters: the ``model`` entry of an fconv checkpoint.

    Raises:
        ValueError: a parameter does not belong to an fconv model, or is no tensor that holds all of its numbers.
    """
    converted = {"version": torch.tensor(ConvS2SModel.state_version)}
    for name, value in parameters.items():  # before any of them is computed with
        if not _is_whole(value):
            raise ValueError(f"{name} is no tensor that holds all of its numbers")
    for name, value in parameters.items():
        if name == "decoder.version" or name.endswith("._linearized_weight"):
            continue
        side, _, rest = name.partition(".")
        module, _, parameter = rest.rpartition(".")
        target = f"{side}.{_renamed(name, side, module)}."
        if parameter == "weight_g":
            converted |= _normalised(target, value, parameters[f"{side}.{module}.weight_v"])
        elif parameter != "weight_v":
            converted[target + parameter] = value
    return converted


def convert_options(args: Namespace, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """The convs2s options with which these parameters fit.

    Args:
        args: the model's options in the checkpoint, all of fconv's options among them.
        parameters: the ``model`` entry of the checkpoint.
    """
    shared = ("dropout", *DEFAULTS, "decoder_attention", "share_input_output_embed")
    options = {**vars(ConvS2SConfig()), **{option: getattr(args, option) for option in shared}, "_name": "convs2s"}
    for side, option in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        # fairseq counts the rows below the first position as positions; what can be used is what lies above them.
        options[option] = parameters[f"{side}.embed_positions.weight"].size(0) - _PADDING_IDX - 1
    return options


def _renamed(name: str, side: str, module: str) -> str:
    if side in ("encoder", "decoder"):
        for pattern, replacement in _RENAMED:
            if re.fullmatch(pattern, module):
                return re.sub(pattern, replacement, module)
    raise ValueError(f"{name} is not a parameter of fairseq's fconv")


def _is_whole(value: Any) -> bool:
    """A file may give a few numbers any shape, by saying that it repeats them, and none at all too."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return 0 < value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _normalised(target: str, magnitude: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """A normalised weight with one magnitude for each output: first dimension of a matrix, last of a convolution."""
    weight_dim = 0 if direction.dim() == 2 else 2
    expected = [size if axis == weight_dim else 1 for axis, size in enumerate(direction.shape)]
    if list(magnitude.shape) != expected:
        sizes = zip(reversed(magnitude.shape), reversed(direction.shape), strict=False)
        if magnitude.dim() > direction.dim() or any(mine not in (1, whole) for mine, whole in sizes):
            raise ValueError(f"{target}: a magnitude of {[*magnitude.shape]} for a direction of {[*direction.shape]}")
        direction = folded_weight(magnitude, direction)
        others = [axis for axis in range(direction.dim()) if axis != weight_dim]
        magnitude = torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    return {target + MAGNITUDE: magnitude, target + DIRECTION: direction}
