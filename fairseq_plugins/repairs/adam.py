"""Adam on a CPU in one pass over the parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.optim.adam import Adam
from torch import Tensor

from fairseq_plugins.repairs.wrapping import wrap


def update_in_one_pass() -> None:
    """Run the steps of ``--optimizer adam`` on a CPU with torch's fused kernel.

    fairseq reads all parameters and moments eleven times in each step.  The optimizer's state, its checkpoints and its
    formula are unchanged, and results differ only by rounding.  No probe is needed, because results are unchanged.
    """
    step_by_operators = Adam.step

    @wrap(Adam, "step")
    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if any(group["amsgrad"] for group in self.param_groups) or not all(map(is_plain, trained)):
            step_by_operators(self)
        else:
            for group in self.param_groups:
                update(self, group)
        return loss


def is_plain(parameter: Tensor) -> bool:
    """Return whether parameter and gradient are dense float32 tensors on a CPU with the same memory layout."""
    grad: Any = parameter.grad
    return all(
        each.device.type == "cpu"
        and each.dtype == torch.float32
        and each.layout == torch.strided
        and each.is_contiguous()
        for each in (parameter, grad)
    )


@torch.no_grad()
def update(optimizer: Adam, group: dict[str, Any]) -> None:
    """Make fairseq's step for those parameters of a group that have gradients."""
    trained = [each for each in group["params"] if each.grad is not None]
    for parameter in trained:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter).contiguous()
    beta1, beta2 = group["betas"]
    # fairseq adds epsilon to the square root of the biased second moment, and torch to the root of the unbiased one.
    # Dividing epsilon by the root of the bias correction makes torch's step equal to fairseq's.
    ordered = sorted(trained, key=lambda each: optimizer.state[each]["step"])
    for number, same in itertools.groupby(ordered, key=lambda each: optimizer.state[each]["step"]):
        parameters = list(same)
        states = [optimizer.state[each] for each in parameters]
        torch._fused_adamw_(
            parameters,
            [each.grad for each in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.tensor(float(number))] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**number),
            amsgrad=False,
            maximize=False,
        )
