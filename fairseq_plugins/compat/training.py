"""What fairseq's trainer and data sets do between epochs and versions."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
from fairseq import checkpoint_utils
from fairseq.data import FairseqDataset, bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.optim.lr_scheduler.manual_lr_scheduler import ManualSchedule
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from fairseq_plugins.nn.literal import literal

__all__ = [
    "find_buckets_with_numpy_2",
    "finish_the_epoch_on_resume",
    "forget_the_training_before",
    "keep_the_batches_on_resume",
    "keep_the_last_batch",
    "leave_a_finished_training_alone",
    "read_numbers_of_manual_schedules",
    "remember_lost_patience",
    "restore_numpy_compat",
]

logger = logging.getLogger(__name__)


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


class Shuffled(FairseqDataset):
    """What the probe makes batches of: sixteen sentences, each a batch, in an order that is drawn."""

    def __len__(self) -> int:
        return 16

    def ordered_indices(self) -> Any:
        return np.random.permutation(len(self))  # noqa: NPY002  (the generator that fairseq seeds)

    def batch_by_size(self, indices: Any, **_: object) -> list[list[int]]:
        return [[int(index)] for index in indices]


def makes_other_batches_in_a_later_epoch(get: Callable[..., Any]) -> bool:
    """Probe: whether the batches that ``get`` makes for all epochs depend on the epoch in which it makes them."""
    level = logging.root.manager.disable
    logging.disable(logging.INFO)  # of each batch iterator it is logged whether it is kept
    try:
        first, later = (get(FairseqTask(None), Shuffled(), epoch=epoch).frozen_batches for epoch in (1, 2))
    finally:
        logging.disable(level)
    return bool(first != later)


def keep_the_batches_on_resume() -> None:
    """fairseq makes the batches for all epochs by the number of the epoch in which the process starts.

    So a training that was stopped goes on with other batches: some sentences come twice in its epoch, others never.
    Here they are always those of a process that started in the first epoch.
    """
    get = FairseqTask.get_batch_iterator
    if not makes_other_batches_in_a_later_epoch(get):
        return
    signature = inspect.signature(get)

    @functools.wraps(get)
    def get_batch_iterator(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        task, dataset, epoch = given["self"], given["dataset"], given["epoch"]
        made_anew = given["disable_iterator_cache"] or given["update_epoch_batch_itr"]
        if made_anew or not task.can_reuse_epoch_itr(dataset) or dataset in task.dataset_to_epoch_iter:
            return get(*args, **kwargs)
        given["epoch"] = 1
        epoch_itr = get(*call.args, **call.kwargs)
        epoch_itr.epoch = epoch
        dataset.set_epoch(epoch)
        return epoch_itr

    FairseqTask.get_batch_iterator = get_batch_iterator


def lost_patience() -> dict[str, Any]:
    """What ``--patience`` goes by: the best validation, and how many there have been since."""
    for name in ("__main__", "fairseq_cli.train"):
        if stop := getattr(sys.modules.get(name), "should_stop_early", None):
            return stop.__dict__
    return {}


def remember_lost_patience() -> None:
    """``--patience`` counts the validations without improvement since the process started, not since the best one.

    They are saved and read with the rest.
    """
    load, save = checkpoint_utils.load_checkpoint, Trainer.save_checkpoint
    if "num_runs" in inspect.unwrap(load).__code__.co_consts:  # the probe: somebody looks for them in the checkpoint
        return

    @functools.wraps(save)
    def save_checkpoint(self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
        return save(self, filename, {**extra_state, "patience": dict(lost_patience())})

    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        extra_state, epoch_itr = load(cfg, trainer, **passthrough)
        if hasattr(checkpoint_utils.save_checkpoint, "best"):  # not where fine-tuning starts
            lost_patience().update((extra_state or {}).get("patience", {}))
        return extra_state, epoch_itr

    Trainer.save_checkpoint, checkpoint_utils.load_checkpoint = save_checkpoint, load_checkpoint


def remembers_another_training(load: Callable[..., Any]) -> bool:
    """Probe: whether the best validation of one training is still there when ``load`` has begun the next."""
    save = checkpoint_utils.save_checkpoint
    save.best = 0.0
    trainer = SimpleNamespace(
        checkpoint_suffix="",
        load_checkpoint=lambda *_, **__: None,
        get_train_iterator=lambda **_: SimpleNamespace(epoch=1),
        lr_step=lambda _: None,
    )
    load(CheckpointConfig(), trainer)
    return vars(save).pop("best", None) is not None


def forget_the_training_before() -> None:
    """Of several trainings in a process (``fairseq-hydra-train --multirun``) each takes the best validation of those
    before for its own: it saves no ``checkpoint_best.pt`` until it is better, and loses its patience early.
    """
    load = checkpoint_utils.load_checkpoint
    if not remembers_another_training(inspect.unwrap(load)):
        return

    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        for memory in (vars(checkpoint_utils.save_checkpoint), lost_patience()):
            for name in ("best", "num_runs"):
                memory.pop(name, None)
        return load(cfg, trainer, **passthrough)

    checkpoint_utils.load_checkpoint = load_checkpoint


def trains_before_it_counts() -> bool:
    """Probe: whether ``fairseq-train`` asks how many updates there have been only after one more.

    Its code is read and not imported, for that would set up its logging.
    """
    name = "fairseq_cli.train"
    module: CodeType = importlib.util.find_spec(name).loader.get_code(name)  # type: ignore[union-attr]
    main = next(code for code in module.co_consts if isinstance(code, CodeType) and code.co_name == "main")
    return "get_num_updates" not in main.co_names


def leave_a_finished_training_alone() -> None:
    """fairseq trains one more update each time that a training is started again which ``--max-update`` has ended.

    And longer, where ``--patience`` has ended it.
    """
    if not trains_before_it_counts():
        return
    load = checkpoint_utils.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **passthrough: Any) -> Any:
        loaded = load(cfg, trainer, **passthrough)
        limits, updates = trainer.cfg.optimization, trainer.get_num_updates()
        hours = trainer.cumulative_training_time() / 3600
        impatient = 0 < trainer.cfg.checkpoint.patience <= lost_patience().get("num_runs", 0)
        if 0 < limits.max_update <= updates or 0 < limits.stop_time_hours < hours or impatient:
            logger.info(f"nothing is left to train: {updates} updates, {hours:.1f} hours")
            limits.max_epoch = -1  # read after this; 0 would be no limit
        return loaded

    checkpoint_utils.load_checkpoint = load_checkpoint


def reads_numbers(parse: Callable[..., dict[int, float]]) -> bool:
    """Probe: whether ``parse`` takes a number for an update."""
    try:
        return parse(None, "{1: 0.5}") == {1: 0.5}
    except TypeError:
        return False


def read_numbers_of_manual_schedules() -> None:
    """``--lr-scheduler manual`` takes ``--update2lr "{'1': 0.1}"``, also ``'1-5'`` and ``'1,5'``, and fails at
    ``{1: 0.1}``.
    """
    parse = ManualSchedule.parse_manuallr_args
    if reads_numbers(parse):
        return

    @functools.wraps(parse)
    def parse_manuallr_args(self: Any, lr_args_str: str) -> dict[int, float]:
        read = literal(lr_args_str)
        named = {str(key): value for key, value in read.items()} if isinstance(read, dict) else read
        return parse(self, str(named))

    ManualSchedule.parse_manuallr_args = parse_manuallr_args


def restore_numpy_compat() -> None:
    """fairseq's data sets ask for ``np.compat.long`` (language models, ``--num-batch-buckets``), gone from NumPy 2."""
    if not hasattr(np, "compat"):
        vars(np)["compat"] = SimpleNamespace(long=int)


def finds_buckets() -> bool:
    """Probe: whether fairseq can ask this NumPy for percentiles."""
    try:
        return list(data_utils.get_buckets([3, 5], 1)) == [5]
    except TypeError:
        return False


def find_buckets_with_numpy_2() -> None:
    """``--num-batch-buckets`` asks ``np.percentile`` for ``interpolation``, which NumPy calls ``method`` since 1.22.

    From 2.4 on it no longer knows the old name.
    """
    if finds_buckets():
        return

    @functools.wraps(data_utils.get_buckets)
    def get_buckets(sizes: Any, num_buckets: int) -> Any:
        return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])

    for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
        module.get_buckets = get_buckets


def keeps_the_last_batch() -> bool:
    """Probe: whether three sentences come back when batches are to have eight or fewer, or a multiple of eight."""
    try:
        batches = data_utils.batch_by_size(np.arange(3), lambda _: 1, max_sentences=8, required_batch_size_multiple=8)
    except IndexError:
        return False
    return sum(map(len, batches)) == 3


def keep_the_last_batch() -> None:
    """Later fairseq drops the last batch if it is no multiple of ``--required-batch-size-multiple``, by default eight.

    Its sentences, the longest ones, are then neither translated by ``fairseq-generate`` nor validated on.
    """
    if keeps_the_last_batch():
        return
    divide = data_utils.batch_by_size

    @functools.wraps(divide)
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
        indices = np.asarray(indices)
        batches = divide(indices, *args, **kwargs) if len(indices) else []
        if kwargs.get("fixed_shapes") is None:  # whose batches have no order to go by
            rest = indices[sum(map(len, batches)) :]
            batches = [*batches, rest] if len(rest) else batches
        return batches

    data_utils.batch_by_size = batch_by_size
