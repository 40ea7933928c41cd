"""Adam for a network with vectors on the simplex: the κ and α of the Weighted Transformer (Ahmed et al. 2017).

After each update those vectors are projected onto the simplex again (section 3).  They step there in one of two ways:

    adam      as the paper has it: Adam's step, then the projection
    tangent   Adam's step with the gradient's mean, which the projection would take away, taken out before, and one
              second moment for a vector, which keeps the gradient's direction

Adam makes of each element's gradient nearly its sign, so that a component which all branches have in common can swamp
what tells them apart; the second way does not see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam
from omegaconf import DictConfig
from torch import Tensor

from fairseq_plugins.nn.simplex import SIMPLEX, SOFTMAX, project_onto_simplex
from fairseq_plugins.optim.config import SimplexAdamConfig
from fairseq_plugins.ranges import FRACTION, check_ranges

__all__ = ["FairseqSimplexAdam", "SimplexAdam"]

logger = logging.getLogger(__name__)


@register_optimizer("simplex_adam", dataclass=SimplexAdamConfig)
class FairseqSimplexAdam(FairseqAdam):
    """Adam with a projection.  With fp16 it needs ``--fp16-no-flatten-grads`` or ``--memory-efficient-fp16``.

    Raises:
        ValueError: ``--fp16-adam-stats`` is given, or a number is out of its range.
    """

    def __init__(self, cfg: DictConfig, params: Iterable[Tensor]) -> None:
        FairseqOptimizer.__init__(self, cfg)
        if cfg.fp16_adam_stats:
            raise ValueError("--optimizer simplex_adam keeps its moments in float32: leave out --fp16-adam-stats")
        check_ranges(cfg, SimplexAdamConfig)
        betas = self.optimizer_config["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2 or any(b not in FRACTION or b == 1 for b in betas):
            raise ValueError(f"--adam-betas must be two numbers, at least 0 and below 1, got {cfg.adam_betas}")
        groups: dict[str, list[Tensor]] = {"network": [], SOFTMAX: [], SIMPLEX: []}
        for parameter in params:
            group = getattr(parameter, "param_group", None)
            groups[group if group in groups else "network"].append(parameter)
        if str(cfg.branch_step) == "tangent" and not groups[SIMPLEX]:
            logger.warning("--branch-step tangent does nothing without branch weights on the simplex")
        self._optimizer = SimplexAdam(
            [{"params": members, "name": name} for name, members in groups.items() if members], **self.optimizer_config
        )

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """What `SimplexAdam` is made with, here and where fairseq makes it anew for each shard of the parameters."""
        return {
            **super().optimizer_config,
            "freeze_after": self.cfg.freeze_branch_weights_after,
            "tangent": str(self.cfg.branch_step) == "tangent",
        }


class SimplexAdam(Adam):
    """fairseq's Adam for the network, and projected steps for the groups named `SIMPLEX`.

    Args:
        params: groups, each with a name.
        freeze_after: the number of updates after which the groups `SIMPLEX` and `SOFTMAX` stay bit for bit the same.
        tangent: which of the two steps to take on the simplex.
        **options: those of Adam.
    """

    # Steps are not pointwise: parameters hidden in one flat vector would be lost.
    supports_flat_params = False
    param_groups: list[dict[str, Any]]

    def __init__(
        self, params: list[dict[str, Any]], *, freeze_after: int | None, tangent: bool, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self.freeze_after = freeze_after
        self.tangent = tangent
        for group in self.param_groups:
            group["updates"] = 0  # saved and restored with the group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update."""
        loss = None
        if closure is not None:  # it may want gradients, and to clear those of all groups
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        active = []
        for group in groups:
            frozen = self.freeze_after is not None and group["updates"] >= self.freeze_after
            group["updates"] += 1
            if group["name"] == "network" or not frozen:
                active.append(group)
        # fairseq's step goes through `param_groups`; not even momentum may move what is frozen.
        try:
            self.param_groups = [group for group in active if group["name"] != SIMPLEX]
            super().step()
        finally:
            self.param_groups = groups
        for group in active:
            if group["name"] == SIMPLEX:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_on_simplex(parameter, group)
        return loss

    def _step_on_simplex(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        if self.tangent:
            gradient = gradient - gradient.mean()
        square = gradient.square().mean() if self.tangent else gradient.square()
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(square)
            if parameter.dtype != torch.float32:
                # In half precision most steps would be rounded away.
                state["master"] = parameter.float()
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state:  # --memory-efficient-fp16 brings it back from a checkpoint where the file was read
                state[name] = state[name].to(parameter.device)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(square, 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        deviation = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        point = state.get("master", parameter)
        point.copy_(project_onto_simplex(point - group["lr"] * mean / deviation))
        if point is not parameter:
            parameter.copy_(point)
