"""Training of the Weighted Transformer (Ahmed et al. 2017): optimizer, learning rates, and loss with statistics.

In each update, Adam changes κ and α, and then they are projected onto the simplex (section 3).  With model width d,
N layers and t updates, the learning rates are (section 4.1):

    network      d^-0.5 · min(t^-0.5, t · 4000^-1.5)
    κ and α      (d/N)^-0.5 · min(t^-0.5, t · 400^-1.5)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.dataclass.configs import OptimizationConfig
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.common.options import FRACTION, check_ranges
from fairseq_plugins.weighted_transformer.branches import SIMPLEX, SOFTMAX, SimplexVector, project_onto_simplex
from fairseq_plugins.weighted_transformer.config import DEFAULTS, SimplexAdamConfig, WeightedInverseSqrtConfig

logger = logging.getLogger(__name__)


@register_optimizer("simplex_adam", dataclass=SimplexAdamConfig)
class FairseqSimplexAdam(FairseqAdam):
    """Adam that projects κ and α onto the simplex.

    ``--fp16`` needs ``--fp16-no-flatten-grads`` or ``--memory-efficient-fp16``, because the projection needs separate
    parameters.
    """

    def __init__(self, cfg: DictConfig, params: Iterable[Tensor]) -> None:
        FairseqOptimizer.__init__(self, cfg)
        if cfg.fp16_adam_stats:
            raise ValueError("--fp16-adam-stats does not work with simplex_adam, whose moments are float32: remove it")
        check_ranges(cfg, SimplexAdamConfig)
        betas = self.optimizer_config["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2 or any(b not in FRACTION or b == 1 for b in betas):
            raise ValueError(f"--adam-betas must be two numbers in [0, 1), got {cfg.adam_betas}")
        groups: dict[str, list[Tensor]] = {"network": [], SOFTMAX: [], SIMPLEX: []}
        for parameter in params:
            group = getattr(parameter, "param_group", None)
            groups[group if group in groups else "network"].append(parameter)
        self._optimizer = SimplexAdam(
            [{"params": members, "name": name} for name, members in groups.items() if members], **self.optimizer_config
        )

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Arguments of `SimplexAdam`; fairseq's sharded optimizers also read these arguments."""
        return {**super().optimizer_config, "freeze_after": self.cfg.freeze_branch_weights_after}


class SimplexAdam(Adam):
    """fairseq's Adam, followed by a projection for parameters in the group `SIMPLEX`.

    The groups `SIMPLEX` and `SOFTMAX` are no longer updated after ``freeze_after`` updates.
    """

    # The projection depends on all elements of a parameter, so parameters must not be flattened into one vector.
    supports_flat_params = False
    param_groups: list[dict[str, Any]]

    def __init__(self, params: list[dict[str, Any]], *, freeze_after: int | None, **options: Any) -> None:
        super().__init__(params, **options)
        self.freeze_after = freeze_after
        for group in self.param_groups:
            group["updates"] = 0  # number of updates so far, stored in checkpoints

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update."""
        groups = self.param_groups
        active = []
        for group in groups:
            frozen = self.freeze_after is not None and group["updates"] >= self.freeze_after
            group["updates"] += 1
            if group["name"] == "network" or not frozen:
                active.append(group)
        # fairseq's step updates all `param_groups`.  Exclude frozen groups, which momentum would still change.
        try:
            self.param_groups = [group for group in active if group["name"] != SIMPLEX]
            loss: float | None = super().step(closure)
        finally:
            self.param_groups = groups
        for group in active:
            if group["name"] == SIMPLEX:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_on_simplex(parameter, group)
        return loss

    @torch.no_grad()
    def _step_on_simplex(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        square = gradient.square()
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(square)
            if parameter.dtype != torch.float32:
                # A step may be too small to change a half-precision number, so also keep the parameter in float32.
                state["master"] = parameter.float()
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state:  # --memory-efficient-fp16 loads the state to the CPU
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


@register_lr_scheduler("weighted_inverse_sqrt", dataclass=WeightedInverseSqrtConfig)
class WeightedInverseSqrt(FairseqLRScheduler):
    """A schedule with linear warm-up and inverse square root decay, for the network and for κ and α separately.

    Learning rates follow from the size of the model.  ``--lr`` is ignored with a warning.

    Attributes:
        needs_rate: whether the schedule needs ``--lr``.  own-data reads this attribute; a schedule without this
            attribute needs ``--lr``.
    """

    needs_rate = False

    def __init__(self, cfg: WeightedInverseSqrtConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if not all("name" in group for group in optimizer.param_groups):
            raise ValueError("--lr-scheduler weighted_inverse_sqrt needs --optimizer simplex_adam")
        check_ranges(cfg, WeightedInverseSqrtConfig)
        if list(optimizer.cfg.lr) != OptimizationConfig().lr:
            logger.warning("--lr has no effect with --lr-scheduler weighted_inverse_sqrt: use --lr-scale")
        # Under hydra, the configuration contains None for each size that the default architecture sets.
        sizes = {
            name: DEFAULTS[name] if cfg[name] is None else cfg[name] for name in ("encoder_embed_dim", "encoder_layers")
        }
        if not str(sizes["encoder_layers"]).isdigit():
            raise ValueError(
                "--lr-scheduler weighted_inverse_sqrt needs a Transformer, whose --encoder-layers is a number, got "
                f"{sizes['encoder_layers']}; use another --lr-scheduler"
            )
        self.dim, self.layers = map(int, sizes.values())
        # Log the sizes for users to check.  Under hydra, users must set lr_scheduler.encoder_layers for fairseq's
        # transformer.
        logger.info(f"learning rates for a model of {self.layers} layers of width {self.dim}")

    def step_update(self, num_updates: int) -> float:
        """Set the rates for the next update."""
        update = num_updates + 1
        cfg = self.cfg
        network = cfg.lr_scale * self.dim**-0.5 * _rise_and_fall(update, cfg.warmup_updates)
        branches = (
            cfg.branch_lr_scale * (self.dim / self.layers) ** -0.5 * _rise_and_fall(update, cfg.branch_warmup_updates)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = network if group["name"] == "network" else branches
        return network


def _rise_and_fall(update: int, warmup: int) -> float:
    return min(update**-0.5, update * warmup**-1.5)


@register_criterion("weighted_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class WeightedLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross-entropy, which also logs statistics of κ and α, averaged over the layers.

    The entropy in bits is log2 M if all M weights are equal, and zero if one weight is 1.  The ratio is the largest
    weight divided by the smallest; ratios above 1000 count as 1000.
    """

    forgets_logits = True

    def forward(self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True) -> Any:
        """Compute fairseq's loss and the statistics, without a synchronisation with the device."""
        loss, sample_size, logging_output = super().forward(model, sample, reduce)
        if model.training:
            logging_output.update(branch_statistics(model), forwards=1)
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss and, in training, the statistics."""
        super().reduce_metrics(logging_outputs)
        if not any("forwards" in log for log in logging_outputs):
            return
        forwards = sum(log["forwards"] for log in logging_outputs)
        for name in (name for name in logging_outputs[0] if name.startswith(("kappa", "alpha"))):
            metrics.log_scalar(name, sum(log[name] for log in logging_outputs) / forwards, round=3)


@torch.no_grad()
def branch_statistics(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return entropies and ratios of the branch weights κ and α, as scalars on the model's device.

    The ratio is the largest branch weight divided by the smallest, but at most 1000.  Entropies and ratios are
    averaged over the layers.
    """
    vectors: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SimplexVector):
            vectors.setdefault(name.rpartition(".")[2], []).append(module.point().float())
    statistics = {}
    for name, points in vectors.items():
        # Encoder and decoder may have different numbers of branches, so pad with NaN, which both statistics ignore.
        filled = pad_sequence(points, batch_first=True, padding_value=math.nan)
        largest, smallest = filled.nan_to_num(-math.inf).amax(1), filled.nan_to_num(math.inf).amin(1)
        statistics[f"{name}_entropy"] = torch.special.entr(filled.nan_to_num(0)).sum(1).mean() / math.log(2)
        statistics[f"{name}_ratio"] = (largest / smallest).clamp(max=1000).mean()
    return statistics
