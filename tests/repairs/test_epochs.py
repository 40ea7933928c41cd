"""A resumed epoch has the remaining batches, also with other processes, other batches or another ``--update-freq``."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fairseq.data import FairseqDataset, data_utils
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator
from fairseq.tasks import FairseqTask

from fairseq_plugins.repairs import epochs

BATCHES = [[2 * number, 2 * number + 1] for number in range(11)]


class Sentences(FairseqDataset):
    """Sentences of random lengths, so that other batches group other sentences."""

    def __init__(self) -> None:
        self.sizes = np.random.RandomState(1).randint(1, 9, 50)

    def __len__(self) -> int:
        return len(self.sizes)

    def ordered_indices(self) -> Any:
        return np.random.permutation(len(self))  # noqa: NPY002  (the generator that fairseq seeds)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def collater(self, samples: object) -> object:
        return samples

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def batches(epoch: int, get: Any = FairseqTask.get_batch_iterator, **options: Any) -> list[list[int]]:
    """Return the batches of a process that starts in this epoch."""
    dataset = Sentences()
    epoch_itr = get(FairseqTask(None), dataset, max_tokens=20, seed=7, epoch=epoch, **options)
    assert epoch_itr.epoch == dataset.epoch == epoch
    return [list(map(int, batch)) for batch in epoch_itr.frozen_batches]


def test_a_later_start_keeps_the_batches() -> None:
    own = inspect.unwrap(FairseqTask.get_batch_iterator)
    assert batches(3) == batches(1) == batches(1, own)


@pytest.mark.parametrize("option", ["disable_iterator_cache", "update_epoch_batch_itr"])
def test_batches_of_one_epoch_are_those_of_fairseq(option: str) -> None:
    """Batches that are made again for each epoch do not depend on the epoch in which a process started."""
    own = inspect.unwrap(FairseqTask.get_batch_iterator)
    assert batches(3, **{option: True}) == batches(3, own, **{option: True})


def iterators(processes: int, batches: list[list[int]] = BATCHES, **options: Any) -> list[EpochBatchIterator]:
    shards = ({"num_shards": processes, "shard_id": rank} for rank in range(processes))
    return [EpochBatchIterator(Sentences(), list, batches, **shard, **options) for shard in shards]


def stopped(processes: int, rows: int, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the state after ``rows`` batches of each process, and the sentences of these batches."""
    ranks = iterators(processes, **options)
    trained = [next(itr) for itr in [each.next_epoch_itr() for each in ranks] for _ in range(rows)]
    return ranks[0].state_dict(), list(itertools.chain(*trained))


def rest(ranks: list[EpochBatchIterator], state: dict[str, Any]) -> list[int]:
    for each in ranks:
        each.load_state_dict(state)
    return list(itertools.chain(*(batch for each in ranks for batch in each.next_epoch_itr())))


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_other_processes_get_the_remaining_batches(processes: int, caplog: pytest.LogCaptureFixture) -> None:
    for before in (1, 2, 3):
        for rows in range(1, math.ceil(len(BATCHES) / before)):
            caplog.clear()
            state, trained = stopped(before, rows)
            counts = Counter([*trained, *rest(iterators(processes), state)])
            assert set(counts) == set(range(22))
            assert max(counts.values()) <= 2
            again = sum(count == 2 for count in counts.values()) // 2
            assert again == before * rows % processes
            assert ("are trained twice" in caplog.text) == (again > 0)


def test_a_batch_is_left_if_the_last_one_is_skipped() -> None:
    """A resumed epoch must keep at least one batch, because fairseq-train fails at an epoch without batches."""
    for rows, processes in itertools.product(range(1, 10), (2, 3)):
        state, _ = stopped(1, rows, skip_remainder_batch=True)
        resumed = iterators(processes, skip_remainder_batch=True)[0]
        assert epochs.rows_passed(resumed, state) < len(resumed) - 1


@pytest.mark.parametrize(
    "other",
    [{"batches": [[each] for each in range(22)]}, {"batches": BATCHES[::-1]}, {"seed": 2}, {"grouped_shuffling": True}],
)
def test_other_batches_resume_after_the_same_share(other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    for rows in range(1, 11):
        state, trained = stopped(1, rows)
        caplog.clear()
        ranks = iterators(3 if "grouped_shuffling" in other else 1, **other)
        found = rest(ranks, state)
        assert "--max-tokens" in caplog.text
        assert 0 < len(found) <= 22 - len(trained) + 6
        if len(ranks) == 1:
            assert len(found) == 22 - len(trained)


def test_the_same_batches_are_known(caplog: pytest.LogCaptureFixture) -> None:
    state, trained = stopped(2, 3, grouped_shuffling=True)
    counts = Counter([*trained, *rest(iterators(2, grouped_shuffling=True), state)])
    assert not caplog.text
    assert max(counts.values()) == 1
    older = {name: state[name] for name in ("version", "epoch", "iterations_in_epoch", "shuffle")}
    assert rest(iterators(2, grouped_shuffling=True), older) == rest(iterators(2, grouped_shuffling=True), state)


def test_another_update_freq_gets_the_remaining_batches() -> None:
    for length, begin, size, skip in itertools.product(range(1, 12), range(1, 10), range(1, 5), (False, True)):
        left = list(range(begin, length))
        batches = CountingIterator(left, start=begin)
        updates = GroupedIterator(batches, size, skip)
        found = list(updates)
        whole = len(left) // size * size  # an incomplete update is skipped after a complete one
        assert list(itertools.chain(*found)) == (left[:whole] if skip and whole else left)
        assert {len(each) for each in found[:-1]} <= {size}
        assert not batches.has_next()
        assert updates.n == len(updates)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("sentences", [0, 1, 7, 8, 9, 15, 37])
@pytest.mark.parametrize("vector", [False, True])
def test_no_sentence_is_lost_to_batches(sentences: int, multiple: int, vector: bool) -> None:
    """Each sentence occurs once, in order; later fairseq drops a last batch whose size is not a multiple of eight."""
    indices = np.random.default_rng(1).permutation(sentences)
    lengths = {"num_tokens_vec": np.full(sentences, 5)} if vector else {}
    batches = data_utils.batch_by_size(
        indices if vector else (index for index in indices),
        num_tokens_fn=lambda _: 5,
        max_sentences=16,
        required_batch_size_multiple=multiple,
        **lengths,
    )
    assert [index for batch in batches for index in batch] == indices.tolist()
    assert all(0 < len(batch) <= 16 for batch in batches)
    assert all(len(batch) % multiple == 0 or len(batch) < multiple for batch in batches[:-1])
