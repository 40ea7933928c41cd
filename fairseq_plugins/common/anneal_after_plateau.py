"""The learning-rate schedule of ConvS2S (Gehring et al. 2017, section 4.2).

The paper says: "Once the validation perplexity stops improving, we reduce the learning rate by an order of magnitude
after each epoch until it falls below 1e-4."  fairseq's ``reduce_lr_on_plateau`` reduces the rate once per plateau.
`AnnealAfterPlateau` reduces the rate after *every* epoch from the first plateau on.

An epoch is a plateau if its validation loss is not below the best loss so far.  Before the first plateau, an
epoch without validation keeps the rate; afterwards, an epoch without validation reduces the rate.
"""

import logging
from dataclasses import dataclass
from typing import Any, List

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from fairseq_plugins.common.options import Range, check_ranges, option

logger = logging.getLogger(__name__)


@dataclass
class AnnealAfterPlateauConfig(FairseqDataclass):
    lr_shrink: float = option(
        0.1, "factor that reduces the learning rate after each epoch from the first plateau on", Range(0, 1, above=True)
    )
    lr: List[float] = II("optimization.lr")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")


@register_lr_scheduler("anneal_after_plateau", dataclass=AnnealAfterPlateauConfig)
class AnnealAfterPlateau(FairseqLRScheduler):
    """A schedule that keeps the learning rate constant until a plateau, and then reduces it after every epoch.

    fairseq's trainer stops when the rate is below ``--stop-min-lr``.
    """

    def __init__(self, cfg: AnnealAfterPlateauConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise ValueError(f"--lr {cfg.lr}: --lr-scheduler anneal_after_plateau needs a single rate")
        check_ranges(cfg, AnnealAfterPlateauConfig)
        self.lr: float = cfg.lr[0]
        self.begun_with = self.lr
        self.annealing = False
        self.epoch = 0
        self.within_epoch = False
        self.optimizer.set_lr(self.lr)

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """Update the rate at the end of an epoch; ``val_loss`` is None without validation, or if no epoch has ended."""
        if val_loss is not None:
            if self._improves(val_loss):
                self.best = val_loss
            else:
                self.annealing = True
        # When training starts or resumes, fairseq also calls this method, with the number of the next epoch.  fairseq
        # saves the checkpoint of an epoch before it updates the schedule.  Therefore, after a resume from this
        # checkpoint, the plugin calls this method with the number of the finished epoch (`repairs.resuming`).
        if self.annealing and (val_loss is not None or self.within_epoch or epoch < self.epoch):
            self.lr *= self.cfg.lr_shrink
        self.epoch, self.within_epoch = epoch, False
        self.optimizer.set_lr(self.lr)
        return self.lr

    def step_begin_epoch(self, epoch: int) -> None:
        """Record that an epoch has begun or has been resumed."""
        self.within_epoch = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs."""
        return {"lr": self.lr, "best": self.best, "annealing": self.annealing, "begun_with": self.begun_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, including the rate; warn if ``--lr`` has changed since training began."""
        if not {"lr", "best", "annealing"} <= state_dict.keys():
            raise ValueError(
                "--lr-scheduler: the checkpoint was trained with another schedule; add --reset-lr-scheduler"
            )
        asked = self.begun_with
        self.begun_with = state_dict.get("begun_with", asked)
        if self.begun_with != asked:
            logger.warning(
                f"--lr {asked}: ignored, training continues with the rate of the checkpoint, {state_dict['lr']}; give "
                "--reset-lr-scheduler to change it"
            )
        self.lr, self.best, self.annealing = state_dict["lr"], state_dict["best"], state_dict["annealing"]
        self.epoch = 0
        self.within_epoch = False
        self.optimizer.set_lr(self.lr)

    def _improves(self, val_loss: float) -> bool:
        if self.best is None:
            return True
        return val_loss > self.best if self.cfg.maximize_best_checkpoint_metric else val_loss < self.best
