"""Logging of means that stay on the device until a log line is written."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from fairseq.logging import metrics
from torch import Tensor

__all__ = ["log_mean"]


def log_mean(name: str, mean: Tensor | float, weight: Tensor | float = 1, *, decimals: int) -> None:
    """Log the mean of what is given until the next log line, rounded.

    fairseq's own rounding waits for the device after each update.  Names that begin with an underscore are not shown;
    the rounded mean is derived from such a one, when somebody looks.
    """
    metrics.log_scalar(f"_{name}", mean, weight)
    metrics.log_derived(name, partial(_rounded_mean, name=f"_{name}", decimals=decimals))


def _rounded_mean(meters: Any, name: str, decimals: int) -> Tensor:
    return torch.as_tensor(meters[name].avg, dtype=torch.float64).round(decimals=decimals)
