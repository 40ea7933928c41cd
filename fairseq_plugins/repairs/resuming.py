"""Choose the right checkpoint for a new, resumed or fine-tuning training, or raise a clear error."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

from fairseq_plugins.common.options import flag
from fairseq_plugins.repairs import saving
from fairseq_plugins.repairs.wrapping import programs, replaced, wrap

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"  # stands for the unknown start of a training that was saved without this plugin


@wrap(checkpoint_utils, "load_checkpoint")
def begin_training_right(load: Any, cfg: Any, trainer: Any, **passthrough: Any) -> Any:
    """Resume from the newest undamaged checkpoint, restore ``--patience``, and do not continue a finished training.

    - Forget the best validation result of an earlier training in this process (``fairseq-hydra-train --multirun``).
    - Load the newest undamaged checkpoint if the last one is damaged or missing.
    - Pass the result of the last validation to the learning-rate schedule; fairseq only saves the result.
    - Restore the count of ``--patience``.
    - Stop at once if ``--max-update``, ``--stop-time-hours`` or ``--patience`` has already ended the training.
    """
    for memory in (vars(checkpoint_utils.save_checkpoint), patience()):
        for name in ("best", "num_runs"):
            memory.pop(name, None)
    with newest_instead_of_last(cfg, trainer):
        extra_state, epoch_itr = load(cfg, trainer, **passthrough)
    if extra_state is not None:
        finish_epoch(cfg, trainer, epoch_itr, extra_state)
    if hasattr(checkpoint_utils.save_checkpoint, "best"):  # fine-tuning starts without a best result
        patience().update((extra_state or {}).get("patience", {}))
    end_finished_training(trainer)
    return extra_state, epoch_itr


def patience() -> dict[str, Any]:
    """Return the state of ``--patience``: the best validation result, and the number of validations since then."""
    found = programs("train")
    return vars(found[-1].should_stop_early) if found else {}


@wrap("train", "validate")
def save_epoch_without_metric(validate: Any, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any) -> Any:
    """Before an unknown ``--best-checkpoint-metric`` stops the training, save a checkpoint of the first epoch."""
    try:
        return validate(cfg, trainer, task, epoch_itr, subsets)
    except KeyError as error:
        metric = cfg.checkpoint.best_checkpoint_metric
        if error.args != (metric,):
            raise
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        raise ValueError(
            f"--best-checkpoint-metric {metric} is not a metric of validation; resume with one of the metrics that "
            "are logged above"
        ) from None


@contextlib.contextmanager
def newest_instead_of_last(cfg: Any, trainer: Any) -> Iterator[None]:
    """Load the newest undamaged checkpoint if ``checkpoint_last.pt`` is damaged or missing, with a warning.

    fairseq does not start with a damaged checkpoint.  The last checkpoint may be missing because the disk was full;
    fairseq then trains from the start and overwrites the other checkpoints.
    """
    last, newest = Path(cfg.save_dir, "checkpoint_last.pt"), None
    is_default = cfg.restore_file == last.name and not trainer.checkpoint_suffix
    if is_default and not (last.is_file() and saving.is_whole(last)):
        newest = saving.newest_whole_checkpoint(last.parent)
    if newest is None:
        yield
        return
    if (start := cfg.finetune_from_model) is not None:
        extra_state = checkpoint_utils.load_checkpoint_to_cpu(str(newest))["extra_state"]
        refuse_another_start(start, str(newest), extra_state.get("finetuned_from", UNKNOWN))
    logger.warning(f"{last} is {'damaged' if last.exists() else 'missing'}; training resumes from {newest}")
    with replaced(cfg, "restore_file", str(newest)), replaced(cfg, "finetune_from_model", None):
        yield


def finish_epoch(cfg: Any, trainer: Any, epoch_itr: Any, extra_state: dict[str, Any]) -> None:
    """Pass the validation loss of the checkpoint's last epoch to the learning-rate schedule.

    fairseq saves a checkpoint before it updates the schedule.  A fine-tuning starts with epoch 1, and its schedule does
    not use the old model's validation loss.
    """
    resumes = not (cfg.reset_lr_scheduler or cfg.reset_optimizer)
    if resumes and epoch_itr.epoch > 1 and epoch_itr.iterations_in_epoch == 0:
        trainer.lr_step(epoch_itr.epoch - 1, extra_state.get("val_loss"))


def end_finished_training(trainer: Any) -> None:
    """Do not train if a limit is already reached; fairseq would make at least one more update at each start."""
    limits, updates = trainer.cfg.optimization, trainer.get_num_updates()
    hours = trainer.cumulative_training_time() / 3600
    impatient = 0 < trainer.cfg.checkpoint.patience <= patience().get("num_runs", 0)
    if 0 < limits.max_update <= updates or 0 < limits.stop_time_hours < hours or impatient:
        logger.info(f"nothing is left to train after {updates} updates and {hours:.1f} hours")
        limits.max_epoch = -1  # fairseq then trains no epoch; 0 would mean no limit


@wrap(Trainer, "save_checkpoint")
def record_origin(save: Any, self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """Store dictionaries, the ``--patience`` count and a fingerprint of ``--finetune-from-model`` in checkpoints."""
    more = {"patience": dict(patience()), "finetuned_from": getattr(self, "finetuned_from", None)}
    return save(self, filename, {**extra_state, **more, "words": words(self.task)})


@wrap(Trainer, "load_checkpoint")
def compare_checkpoints(
    load: Any, self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a checkpoint that is missing, lacks optimizer state, or belongs to another model, vocabulary or training.

    With a missing ``--restore-file``, fairseq would start with random parameters.  Without optimizer state, fairseq
    would continue the old epoch with a new optimizer.
    """
    refuse_missing_file(self.cfg.checkpoint, filename)
    try:
        with saving.loading_masters(self, filename, reset_optimizer):
            extra_state = load(self, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        reason = " ".join(str(error.__context__).split())
        if type(error) is not Exception or error.__context__ is None or reason in str(error):
            raise
        raise RuntimeError(
            f"{filename}: the checkpoint has another architecture or vocabulary; give the --arch of its training, "
            f"and data with its dictionaries (fairseq-preprocess --srcdict --tgtdict): {reason[:200]}"
        ) from None
    if extra_state is None:
        return None
    if not reset_optimizer:
        saving.restore_loss_scale(self.optimizer, extra_state.get("loss_scale"))
        refuse_lost_optimizer(filename, self)
    refuse_other_words(self.task, filename, extra_state, reset_optimizer)
    start = self.cfg.checkpoint.finetune_from_model
    if filename == start:
        self.finetuned_from = saving.fingerprint(filename)
    else:
        self.finetuned_from = extra_state.get("finetuned_from", UNKNOWN)
        refuse_another_start(start, filename, self.finetuned_from)
    return extra_state


def refuse_missing_file(options: Any, filename: str) -> None:
    """Refuse a missing checkpoint, except ``checkpoint_last.pt``, which is the default."""
    names = ("finetune_from_model", "continue_once")
    option = next((name for name in names if getattr(options, name, None) == filename), "restore_file")
    is_default = option == "restore_file" and options.restore_file == CheckpointConfig.restore_file
    if not PathManager.isfile(filename) and (not is_default or os.path.lexists(filename)):
        path = Path(filename).absolute()  # hydra changes the working directory
        raise ValueError(f"{flag(option)} {filename}: {path} is not a file; give the path of a checkpoint")


def refuse_lost_optimizer(filename: str, trainer: Any) -> None:
    """Refuse a checkpoint without optimizer state; fairseq would repeat the warm-up in the middle of the training."""
    saved = sum(last.get("num_updates", 0) for last in trainer._optim_history[-1:])
    if saved != trainer.get_num_updates():
        raise ValueError(
            f"--restore-file {filename} has no optimizer state (saved with --no-save-optimizer-state, or averaged), so "
            f"training cannot resume after its {saved} updates; to begin a training with its parameters, give "
            f"--finetune-from-model {filename} and another --save-dir; to continue its epoch with a new optimizer, "
            "give --reset-optimizer"
        )


def words(task: Any) -> dict[str, str]:
    """Return a digest of each dictionary of a translation task, or {} for other tasks, such as multilingual tasks."""
    if not isinstance(task, TranslationTask):
        return {}
    sides = {"source": task.source_dictionary, "target": task.target_dictionary}
    return {side: hashlib.sha256("\n".join(each.symbols).encode()).hexdigest() for side, each in sides.items()}


def sides_of_other_words(task: Any, extra_state: Any) -> list[str]:
    """Return the sides (source, target) whose dictionaries differ from the checkpoint's digests; [] without digests."""
    saved = extra_state.get("words") if isinstance(extra_state, dict) else None
    if not isinstance(saved, dict):
        return []
    return [side for side, digest in words(task).items() if saved.get(side, digest) != digest]


def refuse_other_words(task: Any, filename: str, extra_state: Any, reset_optimizer: bool) -> None:
    """Refuse dictionaries with words other than the checkpoint's; only warn if the optimizer is reset (fine-tuning)."""
    for side in sides_of_other_words(task, extra_state):
        others = f"{filename}: the checkpoint's {side} dictionary differs from that of the data"
        if not reset_optimizer:
            raise ValueError(f"{others}; give the training's data, or --reset-optimizer to use the new words")
        logger.warning(f"{others}: each word starts with the parameters of the old word that has the same index")


def refuse_another_start(start: str | None, filename: str, recorded: str | None) -> None:
    """Refuse to fine-tune in the folder of another training; fairseq would silently resume the other training.

    If the start of the training in the folder is unknown, no error is raised.  If this training is itself a
    fine-tuning, and the checkpoint ``start`` (``--finetune-from-model``) is missing, no error is raised, either.
    """
    if start is None or recorded == UNKNOWN or (recorded and saving.fingerprint(start) in (recorded, None)):
        return
    begun = "random parameters" if recorded is None else "another checkpoint"
    raise ValueError(
        f"--finetune-from-model {start}: the training in {filename} began with {begun}; choose another --save-dir, or "
        "leave this option out to resume that training"
    )
