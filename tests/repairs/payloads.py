"""Files and options with code that leaves a trace if it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf


class Payload:
    """An object that creates the file ``trace`` when it is unpickled without a check."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


class Pickled:
    """An object that is pickled as a given call, followed by the state of the call's result."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def code(trace: Path) -> str:
    """Return an expression that creates the file ``trace`` when it is evaluated."""
    return f"__import__('os').system('touch {trace}')"


def untrained(data: Path) -> dict[str, Any]:
    """Return a checkpoint of fairseq's smallest transformer before its first update."""
    parser = options.get_training_parser()
    words = [str(data), "--task", "translation", "--arch", "transformer_tiny", "--criterion", "cross_entropy"]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
    torch.manual_seed(1)
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "task_state": {},
    }
