"""``--bf16`` and ``--fp16`` without a TPU or a GPU."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fairseq import options, utils
from fairseq.optim import FP16Optimizer

__all__ = ["flatten_on_gpus_only", "take_bfloat16_for_no_tpu"]


def takes_bfloat16_for_a_tpu(parse: Callable[..., Any]) -> bool:
    """Probe: whether ``parse`` makes ``--tpu`` of ``--bf16``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size")
    for option in ("--bf16", "--fp16"):
        parser.add_argument(option, action="store_true")
    return bool(parse(parser, ["--bf16"]).tpu)


def take_bfloat16_for_no_tpu() -> None:
    """fairseq takes ``--bf16`` for a wish to train on a TPU, also where there is no software for one, and fails."""
    parse = options.parse_args_and_arch
    if getattr(utils, "xm", None) is not None or not takes_bfloat16_for_a_tpu(parse):
        return

    @functools.wraps(parse)
    def parse_args_and_arch(parser: Any, input_args: Sequence[str] | None = None, *more: Any, **others: Any) -> Any:
        parsed = parse(parser, input_args, *more, **others)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        args.tpu = "--tpu" in (sys.argv[1:] if input_args is None else input_args)
        if args.tpu:
            raise ValueError("--tpu needs torch_xla, which is not installed")
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


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
