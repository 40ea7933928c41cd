"""The two learning rates of the Weighted Transformer (Ahmed et al. 2017, section 4.1).

d model width, N layers, t updates:

    network      d^-0.5 · min(t^-0.5, t · 4000^-1.5)
    κ and α      (d/N)^-0.5 · min(t^-0.5, t · 400^-1.5)
"""

from __future__ import annotations

import logging

from fairseq.dataclass.configs import OptimizationConfig
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler

from fairseq_plugins.models.weighted_transformer.config import DEFAULTS
from fairseq_plugins.optim.config import WeightedInverseSqrtConfig
from fairseq_plugins.ranges import check_ranges

__all__ = ["WeightedInverseSqrt"]

logger = logging.getLogger(__name__)


@register_lr_scheduler("weighted_inverse_sqrt", dataclass=WeightedInverseSqrtConfig)
class WeightedInverseSqrt(FairseqLRScheduler):
    """A linear rise and an inverse square root for the network, another for the branches' weights.

    It computes the rates from the model's size: ``--lr`` is not used, and who gives it is told so.

    Raises:
        ValueError: the optimizer is not ``simplex_adam``, a number is out of its range, or layers are no number.
    """

    def __init__(self, cfg: WeightedInverseSqrtConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if not all("name" in group for group in optimizer.param_groups):
            raise ValueError("--lr-scheduler weighted_inverse_sqrt needs --optimizer simplex_adam")
        check_ranges(cfg, WeightedInverseSqrtConfig)
        if list(optimizer.cfg.lr) != OptimizationConfig().lr:
            logger.warning("--lr does nothing with --lr-scheduler weighted_inverse_sqrt: take --lr-scale")
        # Under hydra the sizes of the default architecture are not in the configuration.
        sizes = {
            name: DEFAULTS[name] if cfg[name] is None else cfg[name] for name in ("encoder_embed_dim", "encoder_layers")
        }
        if not str(sizes["encoder_layers"]).isdigit():
            raise ValueError(
                "--lr-scheduler weighted_inverse_sqrt is for Transformers, whose --encoder-layers is a number, and not "
                f"{sizes['encoder_layers']}"
            )
        self.dim, self.layers = map(int, sizes.values())
        # Under hydra fairseq's own transformer has its sizes elsewhere; lr_scheduler.encoder_layers is heard.
        logger.info(f"learning rates are those of a model of {self.layers} layers of width {self.dim}")

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
