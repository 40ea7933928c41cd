"""Save a training by the clock, for `own-data`."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from fairseq import checkpoint_utils

from fairseq_plugins.repairs.wrapping import in_place_of


def save_every(seconds: float) -> None:
    """Write ``checkpoint_last.pt`` within epochs too, whenever the last one is this old.

    fairseq's ``--save-interval-updates`` counts updates, whose time is not known before, and validates at each.
    Several processes would have to agree on the time: they save as fairseq does.
    """
    train: Any = import_module("fairseq_cli.train")
    validate_and_save = train.validate_and_save
    saved = time.monotonic()

    @in_place_of(train, "validate_and_save")
    def validate_and_save_by_time(
        cfg: Any, trainer: Any, task: Any, epoch_itr: Any, valid_subsets: list[str], end_of_epoch: bool
    ) -> Any:
        nonlocal saved
        result = validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        is_old = time.monotonic() - saved >= seconds and cfg.distributed_training.distributed_world_size == 1
        if is_old and not end_of_epoch:
            checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        if is_old or end_of_epoch:
            saved = time.monotonic()
        return result
