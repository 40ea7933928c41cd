"""``--fp16`` without a GPU."""

from __future__ import annotations

import functools
from typing import Any

from fairseq.optim import FP16Optimizer

__all__ = ["flatten_on_gpus_only"]


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
