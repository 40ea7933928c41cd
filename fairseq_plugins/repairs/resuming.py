"""How ``fairseq-train`` begins: with what a checkpoint says, or with the newest whole one where the last is damaged."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_plugins.repairs.contents import ARCHIVE, damage_of
from fairseq_plugins.repairs.wrapping import in_place_of

logger = logging.getLogger(__name__)

PICKLE = b"\x80"  # how files of torch before 1.6 begin, which are no archives and do not show where they end
SAVED_BESIDE_THE_LAST = r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt"  # by fairseq, with all that training needs


def begin_where_training_stopped() -> None:
    """One wrapper of what trainings begin with, which makes each step where the probe finds that fairseq does not.

    The order is theirs: what an earlier training has left is forgotten before anything is loaded; the schedule is told
    of the last validation, and patience is known, before it is asked whether anything is left to train.
    """
    load = checkpoint_utils.load_checkpoint
    begin_afresh = remembers_another_training(load)
    constants = load.__code__.co_consts  # the probe of two steps: does somebody look at what the checkpoint says of it?
    tell_the_schedule, remember_patience = "val_loss" not in constants, "num_runs" not in constants
    end_at_once = trains_before_it_counts()

    @in_place_of(checkpoint_utils, "load_checkpoint")
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        if begin_afresh:
            forget_the_training_before()
        save_where_the_metric_is_unknown()
        with newest_for_the_last(cfg, trainer):
            extra_state, epoch_itr = load(cfg, trainer, **passthrough)
        if tell_the_schedule and extra_state is not None:
            finish_the_epoch(cfg, trainer, epoch_itr, extra_state)
        if remember_patience and hasattr(checkpoint_utils.save_checkpoint, "best"):  # not where fine-tuning starts
            lost_patience().update((extra_state or {}).get("patience", {}))
        if end_at_once:
            leave_a_finished_training_alone(trainer)
        return extra_state, epoch_itr


def trainer_that_loads(load_checkpoint: Callable[..., None]) -> SimpleNamespace:
    """As much of a trainer as a probe needs."""
    iterator, lr_step = SimpleNamespace(epoch=1), lambda _: None
    return SimpleNamespace(
        checkpoint_suffix="", load_checkpoint=load_checkpoint, get_train_iterator=lambda **_: iterator, lr_step=lr_step
    )


def remembers_another_training(load: Callable[..., Any]) -> bool:
    """Probe: whether the best validation of one training is still there when ``load`` has begun the next."""
    save = checkpoint_utils.save_checkpoint
    save.best = 0.0
    load(CheckpointConfig(), trainer_that_loads(lambda *_, **__: None))
    return vars(save).pop("best", None) is not None


def forget_the_training_before() -> None:
    """Of several trainings in a process (``fairseq-hydra-train --multirun``) each takes the best validation of those
    before for its own: it saves no ``checkpoint_best.pt`` until it is better, and loses its patience early.
    """
    for memory in (vars(checkpoint_utils.save_checkpoint), lost_patience()):
        for name in ("best", "num_runs"):
            memory.pop(name, None)


def lost_patience() -> dict[str, Any]:
    """What ``--patience`` goes by: the best validation, and how many there have been since."""
    return vars(program.should_stop_early) if (program := training_program()) else {}


def training_program() -> Any:
    """``fairseq-train``'s own module, where it is at work."""
    modules = (sys.modules.get(name) for name in ("__main__", "fairseq_cli.train"))
    return next((module for module in modules if hasattr(module, "should_stop_early")), None)


def save_where_the_metric_is_unknown() -> None:
    """fairseq looks for ``--best-checkpoint-metric`` after the first epoch, which is lost where there is none."""
    program = training_program()
    validate = getattr(program, "validate", None)
    if validate is None or hasattr(validate, "__wrapped__"):
        return

    @in_place_of(program, "validate")
    def validate_and_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any) -> Any:
        try:
            return validate(cfg, trainer, task, epoch_itr, subsets)
        except KeyError as error:
            metric, (*_, last) = cfg.checkpoint.best_checkpoint_metric, traceback.walk_tb(error.__traceback__)
            if error.args != (metric,) or last[0].f_globals is not vars(program):
                raise
            checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
            saved = f"; with another one the same command goes on from {cfg.checkpoint.save_dir}"
            raise ValueError(
                f"--best-checkpoint-metric {metric}: validation has logged, above, what it can be, and this is not "
                f"among it{'' if cfg.checkpoint.no_save else saved}"
            ) from None


@contextlib.contextmanager
def newest_for_the_last(cfg: Any, trainer: Any) -> Iterator[None]:
    """Where ``checkpoint_last.pt`` is damaged, fairseq does not start again, and where it is missing, as it is when the
    disk was full after the first epoch, it starts anew and writes over the others, though good ones stand beside it.

    Training goes on from the newest undamaged one, and says so.  There is nothing to probe: the last one is taken where
    it is whole.
    """
    last, given = Path(cfg.save_dir, "checkpoint_last.pt"), (cfg.restore_file, cfg.finetune_from_model)
    newest = None
    if cfg.restore_file == last.name and not trainer.checkpoint_suffix and not (last.is_file() and is_whole(last)):
        newest = newest_whole_checkpoint(last.parent, cfg.finetune_from_model)
    if newest is not None:
        logger.warning(f"{last} is {'damaged' if last.exists() else 'missing'}; training goes on from {newest}")
        cfg.restore_file, cfg.finetune_from_model = str(newest), None
    try:
        yield
    finally:
        if newest is not None:
            cfg.restore_file, cfg.finetune_from_model = given


def newest_whole_checkpoint(folder: Path, tuned: str | None = None) -> Path | None:
    """The one that was written last.

    Args:
        tuned: what is fine-tuned, if anything is: only checkpoints of its fine-tuning count.
    """
    saved = (path for path in folder.glob("*.pt") if re.fullmatch(SAVED_BESIDE_THE_LAST, path.name))
    newest = sorted(saved, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest if is_whole(path) and (tuned is None or is_tuned_from(path, tuned))), None)


def is_tuned_from(path: Path, tuned: str) -> bool:
    """Whether this is a checkpoint of a training that has begun with that one, which is known by name if it is gone."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if (wanted := fingerprint(tuned)) is not None:
        return bool(state["extra_state"].get("finetuned_from") == wanted)
    name = state["cfg"].checkpoint.finetune_from_model
    return name is not None and Path(name).resolve() == Path(tuned).resolve()


def fingerprint(checkpoint: str) -> str | None:
    """What tells it from others wherever it lies: a checksum of its contents, or None where there is no such file."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            contents = repr(sorted((each.CRC, each.file_size) for each in archive.infolist())).encode()
    except OSError:
        return None
    except zipfile.BadZipFile:  # of torch before 1.6
        contents = Path(checkpoint).read_bytes()
    return hashlib.sha256(contents).hexdigest()


def is_whole(path: Path) -> bool:
    """Return whether all records of an archive match their checksums; older files do not show their damage."""
    with path.open("rb") as file:
        start = file.read(len(ARCHIVE))
        return (start == ARCHIVE or start[:1] == PICKLE) and damage_of(file) is None


def finish_the_epoch(cfg: Any, trainer: Any, epoch_itr: Any, extra_state: dict[str, Any]) -> None:
    """fairseq saves at the end of an epoch before it tells the learning-rate schedule how validation went.

    A resumed training would never tell it; a schedule that waits for a plateau would miss one. Fine-tuning starts with
    the first epoch: what validation said of the old model is not its business.
    """
    goes_on = not (cfg.reset_lr_scheduler or cfg.reset_optimizer)
    if goes_on and epoch_itr.epoch > 1 and epoch_itr.iterations_in_epoch == 0:
        trainer.lr_step(epoch_itr.epoch - 1, extra_state.get("val_loss"))


def trains_before_it_counts() -> bool:
    """Probe: whether ``fairseq-train`` asks how many updates there have been only after one more.

    Its code is read and not imported, for that would set up its logging.
    """
    name = "fairseq_cli.train"
    module: CodeType = importlib.util.find_spec(name).loader.get_code(name)  # type: ignore[union-attr]
    main = next(code for code in module.co_consts if isinstance(code, CodeType) and code.co_name == "main")
    return "get_num_updates" not in main.co_names


def leave_a_finished_training_alone(trainer: Any) -> None:
    """fairseq trains one more update each time that a training is started again which ``--max-update`` has ended.

    And longer, where ``--patience`` has ended it.
    """
    limits, updates = trainer.cfg.optimization, trainer.get_num_updates()
    hours = trainer.cumulative_training_time() / 3600
    impatient = 0 < trainer.cfg.checkpoint.patience <= lost_patience().get("num_runs", 0)
    if 0 < limits.max_update <= updates or 0 < limits.stop_time_hours < hours or impatient:
        logger.info(f"nothing is left to train: {updates} updates, {hours:.1f} hours")
        limits.max_epoch = -1  # read after this; 0 would be no limit
