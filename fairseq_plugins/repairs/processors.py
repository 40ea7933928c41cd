"""Training on a processor, in half precision and beside a GPU."""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from typing import Any

import torch
from fairseq import utils
from fairseq.optim import FP16Optimizer
from torch import Tensor

from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.repairs.wrapping import in_place_of


def clip_gradients_where_they_are() -> None:
    """With ``--cpu`` fairseq moves the gradients' norm to a GPU if there is one, and then cannot clip by it.

    The probe is of the code: to ask it takes a GPU.
    """
    clip = utils.clip_grad_norm_
    if "current_device()" not in inspect.getsource(clip):
        return

    @in_place_of(utils, "clip_grad_norm_")
    def clip_grad_norm_(params: Any, *args: Any, **kwargs: Any) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        is_on_gpu = any(getattr(each, "is_cuda", False) for each in params)  # there may be None
        with nullcontext() if is_on_gpu else replaced(torch.cuda, "is_available", lambda: False):
            return clip(params, *args, **kwargs)


def flatten_on_gpus_only() -> None:
    """``--fp16`` puts all parameters into one vector for each GPU, and fails without one.

    There they stay apart, as with ``--fp16-no-flatten-grads``.
    """
    if "current_device" not in FP16Optimizer.build_fp32_params.__func__.__code__.co_names:  # the probe: it asks for one
        return
    build: Any = FP16Optimizer.build_optimizer.__func__

    @functools.wraps(build)
    def build_optimizer(cls: Any, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if not any(each.is_cuda for each in params):
            cfg.common.fp16_no_flatten_grads = True
        return build(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_optimizer)  # type: ignore[arg-type]
