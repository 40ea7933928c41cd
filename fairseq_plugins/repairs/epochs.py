"""Repairs that make an epoch's batches independent of resuming, the number of processes, and ``--update-freq``."""

from __future__ import annotations

import hashlib
import inspect
import logging
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from fairseq.tasks import FairseqTask

from fairseq_plugins.repairs.wrapping import wrap

logger = logging.getLogger(__name__)


@wrap(FairseqTask, "get_batch_iterator")
def keep_batches_on_resume(get: Any, *args: Any, **kwargs: Any) -> Any:
    """Use the same batches before and after a resume, and skip sentences longer than ``--max-tokens``.

    fairseq's batches depend on the epoch in which the process starts.  After a resume, some sentences therefore occur
    twice in an epoch, and other sentences never.  fairseq also fails at a sentence longer than ``--max-tokens``,
    although fairseq skips sentences that are too long for the model.
    """
    call = inspect.signature(get).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    task, dataset, epoch = given["self"], given["dataset"], given["epoch"]
    if given["ignore_invalid_inputs"]:
        given["max_positions"] = utils.resolve_max_positions(given["max_positions"], given["max_tokens"])
    of_one_epoch = given["disable_iterator_cache"] or given["update_epoch_batch_itr"]
    if of_one_epoch or not task.can_reuse_epoch_itr(dataset) or dataset in task.dataset_to_epoch_iter:
        return get(*call.args, **call.kwargs)
    given["epoch"] = 1
    epoch_itr = get(*call.args, **call.kwargs)
    epoch_itr.epoch = epoch
    dataset.set_epoch(epoch)
    return epoch_itr


@wrap(data_utils, "batch_by_size")
def keep_the_last_batch(divide: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the last batch, even if its size is not a multiple of ``--required-batch-size-multiple``.

    The package fairseq-fixed drops the last batch if its size is not a multiple of this option's value, and fails if
    there are no sentences.  Translation and validation would then omit the longest sentences, because the last batch
    contains these sentences.
    """
    indices = np.fromiter(indices, np.int64)  # fairseq accepts generators
    batches = divide(indices, *args, **kwargs) if len(indices) else []
    if kwargs.get("fixed_shapes") is None:  # with fixed shapes, batches do not follow the order of `indices`
        rest = indices[sum(map(len, batches)) :]
        batches = [*batches, rest] if len(rest) else batches
    return batches


@wrap(EpochBatchIterator, "state_dict")
def resume_with_other_processes(save: Any, self: EpochBatchIterator) -> dict[str, Any]:
    """Save how many batches all processes together have trained; a resumed training skips these batches.

    fairseq saves the number of batches of one process.  If a training in one process is resumed in two processes,
    the training skips half an epoch or crashes.  With another ``--max-tokens``, the number of batches in an epoch
    changes, so fairseq skips too many or too few batches, or crashes.
    """
    state: dict[str, Any] = save(self)
    if type(self) is EpochBatchIterator and (rows := state["iterations_in_epoch"]):
        state |= {"passed": rows * self.num_shards, "batches": len(self.frozen_batches), "order": order_of(self)}
    return state


@wrap(EpochBatchIterator, "load_state_dict")
def skip_trained_batches(load: Any, self: EpochBatchIterator, state_dict: dict[str, Any]) -> None:
    """Skip the batches that the stopped training has trained, even if the number of processes has changed."""
    if type(self) is EpochBatchIterator and "passed" in state_dict:
        state_dict = {**state_dict, "iterations_in_epoch": rows_passed(self, state_dict)}
    load(self, state_dict)


def order_of(iterator: EpochBatchIterator) -> str:
    """Return a digest of the batches of all processes and of their shuffled order."""
    shuffled_by = (iterator.seed, iterator.num_shards if iterator.grouped_shuffling else None)
    digest = hashlib.sha256(repr(shuffled_by).encode())
    for batch in iterator.frozen_batches:
        digest.update(np.array([len(batch), *batch], dtype=np.int64).tobytes())
    return digest.hexdigest()


def rows_passed(iterator: EpochBatchIterator, state: dict[str, Any]) -> int:
    """Return the number of batches that each process must skip to continue where the checkpoint was saved."""
    processes, epoch, passed, before = iterator.num_shards, state["epoch"], state["passed"], state["batches"]
    batches = len(iterator.frozen_batches)
    if state["order"] != order_of(iterator):
        logger.warning(
            "--max-tokens, --batch-size, --seed or the data have changed, so the batches are new: the checkpoint was "
            f"saved after {passed} of {before} batches of epoch {epoch}; training resumes after the same fraction of "
            "the new batches, which repeats some sentences and skips others"
        )
    elif again := passed % processes:
        logger.info(
            f"the checkpoint was saved after {passed} batches of epoch {epoch}; {passed} is not a multiple of the "
            f"number of processes, {processes}: the last {again} of the {passed} batches are trained twice"
        )
    rows = batches // processes if iterator.grouped_shuffling else len(iterator)
    last = rows - 1 - iterator.skip_remainder_batch
    return max(0, min(passed * batches // before // processes, last))


@wrap(GroupedIterator, "__init__")
def finish_epochs_with_other_update_freq(
    init: Any, self: Any, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False
) -> None:
    """Count updates correctly if the number of trained batches is not a multiple of ``--update-freq``.

    fairseq counts one update too few, loses the last batches of the epoch, and may repeat the epoch.
    """
    begin = getattr(iterable, "n", 0)
    if begin == 0:
        init(self, iterable, chunk_size, skip_remainder_batch)
        return
    init(self, iterable, chunk_size)
    whole, rest = divmod(len(iterable) - begin, chunk_size)
    self.n = self.total - whole - (rest > 0)
    if skip_remainder_batch and whole > 0:  # fairseq would crash in an epoch without updates
        self.take(self.n + whole)
        iterable.take(begin + whole * chunk_size)
