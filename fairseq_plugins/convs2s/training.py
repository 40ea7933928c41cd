"""The learning-rate schedule of ConvS2S (Gehring et al. 2017, section 4.2).

"Once the validation perplexity stops improving, we reduce the learning rate by an order of magnitude after each epoch
until it falls below 1e-4."  fairseq's ``reduce_lr_on_plateau`` waits for another plateau after each reduction, and a
better epoch in between keeps the rate; here the first plateau starts a reduction after *every* epoch.

Only an epoch that is validated can show a plateau, so without validation (``--disable-validation``, or a validation
set that is missing) the rate stays as it is; once it has begun to fall, epochs without validation reduce it too.
"""

from __future__ import annotations

import logging
from typing import Any

from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler

from fairseq_plugins.common.options import check_ranges
from fairseq_plugins.convs2s.config import AnnealAfterPlateauConfig

logger = logging.getLogger(__name__)


@register_lr_scheduler("anneal_after_plateau", dataclass=AnnealAfterPlateauConfig)
class AnnealAfterPlateau(FairseqLRScheduler):
    """A constant rate, divided after every epoch from the first one on that does not improve validation.

    Training stops below ``--stop-min-lr``, an option of fairseq's trainer.

    Raises:
        ValueError: more than one learning rate is given, or what they are multiplied by does not make them smaller.
    """

    def __init__(self, cfg: AnnealAfterPlateauConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise ValueError("--lr-scheduler anneal_after_plateau takes one learning rate; see --lr-scheduler fixed")
        check_ranges(cfg, AnnealAfterPlateauConfig)
        self.lr: float = cfg.lr[0]
        self.begun_with = self.lr
        self.annealing = False
        self.epoch = 0
        self.within_epoch = False
        self.optimizer.set_lr(self.lr)

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """At the end of an epoch; ``val_loss`` is None where fairseq did not validate, or where no epoch has ended."""
        if val_loss is not None:
            if self._improves(val_loss):
                self.best = val_loss
            else:
                self.annealing = True
        # fairseq also calls when it starts or resumes, with the epoch to go on with; then perhaps with the one before,
        # whose end the checkpoint was too early for.
        if self.annealing and (val_loss is not None or self.within_epoch or epoch < self.epoch):
            self.lr *= self.cfg.lr_shrink
        self.epoch, self.within_epoch = epoch, False
        self.optimizer.set_lr(self.lr)
        return self.lr

    def step_begin_epoch(self, epoch: int) -> None:
        """At the beginning of an epoch, or where it is gone on with."""
        self.within_epoch = True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs."""
        return {"lr": self.lr, "best": self.best, "annealing": self.annealing, "begun_with": self.begun_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; another rate than it began with is not taken, and that is said.

        Raises:
            ValueError: it is of another schedule.
        """
        if not {"lr", "best", "annealing"} <= state_dict.keys():
            raise ValueError(
                "the checkpoint's --lr-scheduler was another one; to begin anew, give --reset-lr-scheduler"
            )
        asked = self.begun_with
        self.begun_with = state_dict.get("begun_with", asked)
        if self.begun_with != asked:
            logger.warning(
                f"--lr {asked}: training goes on with the rate of the checkpoint, {state_dict['lr']}; to take "
                "the other, give --reset-lr-scheduler"
            )
        self.lr, self.best, self.annealing = state_dict["lr"], state_dict["best"], state_dict["annealing"]
        self.epoch = 0
        self.within_epoch = False
        self.optimizer.set_lr(self.lr)

    def _improves(self, val_loss: float) -> bool:
        if self.best is None:
            return True
        return val_loss > self.best if self.cfg.maximize_best_checkpoint_metric else val_loss < self.best
