"""Conversion of fconv checkpoints to convs2s.

fconv and convs2s compute the same function.  fairseq's checkpoints store normalised convolution weights in two ways.
If ``decoder.version`` is 2, a weight has one magnitude per output.  If ``decoder.version`` is 1 or missing, weights of
the decoder have one magnitude per kernel position, and the checkpoint may contain an outdated copy of a weight,
``_linearized_weight``.
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

from fairseq_plugins.common.options import architecture
from fairseq_plugins.common.weight_norm import DIRECTION, MAGNITUDE, folded_weight
from fairseq_plugins.convs2s.config import DEFAULTS, ConvS2SConfig
from fairseq_plugins.convs2s.model import ConvS2SModel

_PADDING_IDX = 1  # index of padding in every fairseq dictionary

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
    """Convert an fconv checkpoint to a convs2s checkpoint."""
    cfg = state["cfg"]
    options = cfg.model
    name = architecture(options)
    family = ARCH_MODEL_NAME_REGISTRY.get(name, "unknown")
    if family != "fconv":
        raise ValueError(
            f"architecture {name!r} (family {family}) is not fairseq's fconv; give an fconv checkpoint, or --user-dir "
            "if you registered your own fconv architecture"
        )
    ARCH_CONFIG_REGISTRY[name](options)  # add the architecture's defaults, which old checkpoints lack
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
        # The optimizer's state is dropped, because it refers to parameters by their order in fconv.
        "last_optimizer_state": None,
    }


def convert_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of the convs2s model that computes the same function as fconv with these parameters."""
    converted = {"version": torch.tensor(ConvS2SModel.state_version)}
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
    """Return the convs2s options that match the options and parameters of an fconv model."""
    shared = ("dropout", *DEFAULTS, "decoder_attention", "share_input_output_embed")
    options = {**vars(ConvS2SConfig()), **{option: getattr(args, option) for option in shared}, "_name": "convs2s"}
    for side, option in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        # The table of position embeddings begins with unused rows, which fairseq's option counts as positions.
        options[option] = parameters[f"{side}.embed_positions.weight"].size(0) - _PADDING_IDX - 1
    return options


def _renamed(name: str, side: str, module: str) -> str:
    if side in ("encoder", "decoder"):
        for pattern, replacement in _RENAMED:
            if re.fullmatch(pattern, module):
                return re.sub(pattern, replacement, module)
    raise ValueError(f"{name} is not a parameter of fairseq's fconv; use another checkpoint")


def _normalised(target: str, magnitude: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a normalised weight with one magnitude per output.

    A linear layer's weight has the shape (outputs, inputs).  A convolution's weight has the shape (kernel width,
    inputs, outputs).
    """
    weight_dim = 0 if direction.dim() == 2 else 2
    expected = [size if axis == weight_dim else 1 for axis, size in enumerate(direction.shape)]
    if list(magnitude.shape) != expected:
        sizes = zip(reversed(magnitude.shape), reversed(direction.shape), strict=False)
        if magnitude.dim() > direction.dim() or any(mine not in (1, whole) for mine, whole in sizes):
            raise ValueError(
                f"{target} has a magnitude {[*magnitude.shape]} that does not fit its direction {[*direction.shape]}; "
                "use another checkpoint"
            )
        direction = folded_weight(magnitude, direction)
        others = [axis for axis in range(direction.dim()) if axis != weight_dim]
        magnitude = torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    return {target + MAGNITUDE: magnitude, target + DIRECTION: direction}
