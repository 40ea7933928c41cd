"""Resume within an epoch, also with another number of processes, another ``--update-freq`` or other batches."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator

from fairseq_plugins.repairs.wrapping import in_place_of, silently

logger = logging.getLogger(__name__)


def resume_with_another_number_of_processes() -> None:
    """fairseq saves how many batches each process has had, and not how many processes there were.

    Two processes that go on for one would skip half of an epoch, or fail.  Other batches than before, as
    ``--max-tokens`` makes them, would have the same effect.  The probe reads the code: processes would be needed to
    ask.
    """
    save, load = EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict
    if "num_shards" in load.__code__.co_names:
        return

    @in_place_of(EpochBatchIterator, "state_dict")
    def state_dict(self: EpochBatchIterator) -> dict[str, Any]:
        state: dict[str, Any] = save(self)
        if type(self) is EpochBatchIterator and (rows := state["iterations_in_epoch"]):
            state |= {"passed": rows * self.num_shards, "batches": len(self.frozen_batches), "order": order_of(self)}
        return state

    @in_place_of(EpochBatchIterator, "load_state_dict")
    def load_state_dict(self: EpochBatchIterator, state_dict: dict[str, Any]) -> None:
        if type(self) is EpochBatchIterator and "passed" in state_dict:
            state_dict = {**state_dict, "iterations_in_epoch": rows_passed(self, state_dict)}
        load(self, state_dict)


def order_of(iterator: EpochBatchIterator) -> str:
    """A digest of the batches of all processes and of what shuffles them."""
    shuffled_by = (iterator.seed, iterator.num_shards if iterator.grouped_shuffling else None)
    digest = hashlib.sha256(repr(shuffled_by).encode())
    for batch in iterator.frozen_batches:
        digest.update(np.array([len(batch), *batch], dtype=np.int64).tobytes())
    return digest.hexdigest()


def rows_passed(iterator: EpochBatchIterator, state: dict[str, Any]) -> int:
    """How many batches each process skips: it begins where the checkpoint's processes together have stopped."""
    processes, epoch, passed, before = iterator.num_shards, state["epoch"], state["passed"], state["batches"]
    batches = len(iterator.frozen_batches)
    if state["order"] != order_of(iterator):
        logger.warning(
            "the batches are not those of the checkpoint, as with another --max-tokens, --batch-size or --seed, or "
            f"other data: epoch {epoch} goes on after the same share of it ({passed} of {before} batches), so some "
            "sentences come twice in it and others do not come"
        )
    elif again := passed % processes:
        logger.info(
            f"{passed} batches of epoch {epoch} are trained, which {processes} processes cannot share equally: the "
            f"last {again} of them come twice"
        )
    rows = batches // processes if iterator.grouped_shuffling else len(iterator)
    last = rows - 1 - iterator.skip_remainder_batch
    return max(0, min(passed * batches // before // processes, last))


def loses_the_end() -> bool:
    """Probe: whether a batch is lost where an update is to have two, and one of four batches is trained already."""
    with silently():
        return sum(map(len, GroupedIterator(CountingIterator([0] * 3, start=1), 2))) < 3


def finish_epochs_with_another_update_freq() -> None:
    """fairseq counts an update too few where the batches that are trained are no multiple of ``--update-freq``.

    It would lose the last batches of the epoch, and then begin the same epoch once more.
    """
    if not loses_the_end():
        return
    init = GroupedIterator.__init__

    @in_place_of(GroupedIterator, "__init__")
    def __init__(self: Any, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False) -> None:  # noqa: N807  (its name)
        begin = getattr(iterable, "n", 0)
        if begin == 0:
            init(self, iterable, chunk_size, skip_remainder_batch)
            return
        init(self, iterable, chunk_size)
        whole, rest = divmod(len(iterable) - begin, chunk_size)
        self.n = self.total - whole - (rest > 0)
        if skip_remainder_batch and whole > 0:  # an epoch without any update would fail
            self.take(self.n + whole)
            iterable.take(begin + whole * chunk_size)
