"""Training in half precision is saved with its float32 parameters, and goes on from them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.optim import FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.trainer import Trainer
from torch import Tensor, nn

from fairseq_plugins.repairs.wrapping import in_place_of

logger = logging.getLogger(__name__)

# The state of fairseq's loss scaler that its own checkpoints leave out, and the state of torch's scaler.
COUNTERS = (
    "_iter",
    "_last_overflow_iter",
    "_last_rescale_iter",
    "_overflows_since_rescale",
    "scale",
    "_growth_tracker",
)


def masters(optimizer: Any) -> dict[Tensor, Tensor]:
    """Map each parameter in half precision to the float32 tensor that the optimizer updates in its place."""
    if not isinstance(optimizer, FP16Optimizer):
        return {}
    exact = optimizer.fp32_params
    if not optimizer.has_flat_params:
        return dict(zip(optimizer.fp16_params, (each.data for each in exact), strict=True))
    found: dict[Tensor, Tensor] = {}
    for device, vector in exact.items():
        own = [each for each in optimizer.fp16_params if each.device.index == device]
        pieces = vector.data.split([each.numel() for each in own])
        found |= {each: piece.view_as(each) for each, piece in zip(own, pieces, strict=True)}
    return found


def modules(trainer: Trainer) -> dict[str, nn.Module]:
    """The modules with trained parameters, by their names in a checkpoint."""
    return {"model": trainer.get_model(), "criterion": trainer.get_criterion()}


def save_masters() -> None:
    """With ``--bf16`` or ``--fp16`` fairseq saves the rounded parameters and not the float32 ones that it trains.

    A resumed training would begin with rounded ones.  fairseq writes float32 numbers in both cases, so the file keeps
    its layout and size.  The probe reads the code of the optimizer: a training would be needed to ask.
    """
    get = Trainer.state_dict
    if "fp32_params" in FP16Optimizer.state_dict.__code__.co_names:
        return

    @in_place_of(Trainer, "state_dict")
    def state_dict(self: Any) -> dict[str, Any]:
        state: dict[str, Any] = get(self)
        exact = masters(self.optimizer)
        for part, module in modules(self).items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter in exact:
                    state[part][name] = exact[parameter]
        if "last_optimizer_state" in state and (counters := scaler_state(self.optimizer)):
            state["extra_state"]["loss_scale"] = counters
        return state


@contextlib.contextmanager
def loading_masters(trainer: Trainer, filename: str, reset_optimizer: bool) -> Iterator[None]:
    """Give the optimizer the float32 parameters of the checkpoint that is loaded meanwhile, on each rank.

    Parameters that the file has rounded, as plain fairseq and older versions save them, are reported.
    """
    read: dict[Tensor, Tensor] = {}

    def keep(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        names = ((prefix + name, parameter) for name, parameter in module.named_parameters())
        read.update({parameter: state[name] for name, parameter in names if name in state})

    hooks = [module.register_load_state_dict_pre_hook(keep) for module in modules(trainer).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    exact = masters(trainer.optimizer) if read else {}
    loaded = [(parameter, read[parameter]) for parameter in exact if parameter in read]
    for parameter, value in loaded:
        exact[parameter].copy_(value)
    if loaded and not reset_optimizer and all(is_rounded(value, parameter.dtype) for parameter, value in loaded):
        logger.warning(
            f"{filename} has no float32 parameters: training goes on from rounded ones, and ends with slightly other "
            "parameters than without the stop"
        )


def is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding to ``dtype`` changes nothing."""
    return torch.equal(value, value.to(dtype).to(value.dtype))


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """The counters by which the loss scale of ``--fp16`` or ``--amp`` changes; empty where nothing scales the loss."""
    scaler = getattr(optimizer, "scaler", None)
    state = {} if scaler is None else vars(scaler) if isinstance(scaler, DynamicLossScaler) else scaler.state_dict()
    return {name: state[name] for name in COUNTERS if name in state}


def restore_loss_scale(optimizer: Any, saved: Any) -> None:
    """fairseq restores the scale of ``--fp16`` without its counters, so that it changes at other updates.

    The scale of ``--amp`` would not be restored.
    """
    saved = saved if isinstance(saved, dict) else {}
    known = {name: saved[name] for name in scaler_state(optimizer) if type(saved.get(name)) in (int, float)}
    if known and isinstance(optimizer.scaler, DynamicLossScaler):
        vars(optimizer.scaler).update(known)
    elif known:
        optimizer.scaler.load_state_dict({**optimizer.scaler.state_dict(), **known})
