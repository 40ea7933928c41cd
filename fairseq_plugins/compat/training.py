"""What fairseq's trainer and data sets do between epochs and versions."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from fairseq import checkpoint_utils

__all__ = ["finish_the_epoch_on_resume", "restore_numpy_compat"]


def finish_the_epoch_on_resume() -> None:
    """fairseq saves at the end of an epoch before it tells the learning-rate schedule how validation went.

    A resumed training would never tell it; a schedule that waits for a plateau would miss one.
    """
    load = checkpoint_utils.load_checkpoint
    if "val_loss" in load.__code__.co_consts:  # the probe: somebody looks at what the checkpoint says of it
        return

    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        extra_state, epoch_itr = load(cfg, trainer, **passthrough)
        resumed = extra_state is not None and not (cfg.reset_lr_scheduler or cfg.reset_optimizer)
        # Fine-tuning starts with the first epoch: what validation said of the old model is not its business.
        if resumed and epoch_itr.epoch > 1 and epoch_itr.iterations_in_epoch == 0:
            trainer.lr_step(epoch_itr.epoch - 1, extra_state.get("val_loss"))
        return extra_state, epoch_itr

    checkpoint_utils.load_checkpoint = load_checkpoint


def restore_numpy_compat() -> None:
    """fairseq's data sets ask for ``np.compat.long`` (language models, ``--num-batch-buckets``), gone from NumPy 2."""
    if not hasattr(np, "compat"):
        vars(np)["compat"] = SimpleNamespace(long=int)
