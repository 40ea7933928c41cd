"""A training that is stopped within an epoch goes on where it was, whatever the processes and batches are then."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator

from fairseq_plugins.repairs import mid_epoch
from tests import faults
from tests.repairs.test_distributed import fork
from tests.repairs.test_precision import train, words
from tests.repairs.test_training import Sentences, updates

BATCHES = [[2 * number, 2 * number + 1] for number in range(11)]


def iterators(processes: int, batches: list[list[int]] = BATCHES, **options: Any) -> list[EpochBatchIterator]:
    shards = ({"num_shards": processes, "shard_id": rank} for rank in range(processes))
    return [EpochBatchIterator(Sentences(), list, batches, **shard, **options) for shard in shards]


def stopped(processes: int, rows: int, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """The state after so many batches of each process, and the sentences of these."""
    ranks = iterators(processes, **options)
    trained = [next(itr) for itr in [each.next_epoch_itr() for each in ranks] for _ in range(rows)]
    return ranks[0].state_dict(), list(itertools.chain(*trained))


def rest(ranks: list[EpochBatchIterator], state: dict[str, Any]) -> list[int]:
    for each in ranks:
        each.load_state_dict(state)
    return list(itertools.chain(*(batch for each in ranks for batch in each.next_epoch_itr())))


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_another_number_of_processes_has_the_rest(processes: int, caplog: pytest.LogCaptureFixture) -> None:
    for before in (1, 2, 3):
        for rows in range(1, math.ceil(len(BATCHES) / before)):
            caplog.clear()
            state, trained = stopped(before, rows)
            counts = Counter([*trained, *rest(iterators(processes), state)])
            assert set(counts) == set(range(22))
            assert max(counts.values()) <= 2
            again = sum(count == 2 for count in counts.values()) // 2
            assert again == before * rows % processes
            assert ("come twice" in caplog.text) == (again > 0)


def test_something_is_left_where_the_last_batch_is_skipped() -> None:
    """An epoch without any batch ends fairseq-train with an error."""
    for rows in range(1, 10):
        state, _ = stopped(1, rows, skip_remainder_batch=True)
        resumed = iterators(2, skip_remainder_batch=True)[0]
        assert mid_epoch.rows_passed(resumed, state) < len(resumed) - 1


def test_the_next_epoch_is_whole() -> None:
    state, _ = stopped(1, 5)
    ranks = iterators(2)
    rest(ranks, state)
    assert {each.next_epoch_idx for each in ranks} == {2}
    assert sorted(itertools.chain(*(batch for each in ranks for batch in each.next_epoch_itr()))) == list(range(22))


@pytest.mark.parametrize(
    "other",
    [{"batches": [[each] for each in range(22)]}, {"batches": BATCHES[::-1]}, {"seed": 2}, {"grouped_shuffling": True}],
)
def test_other_batches_go_on_after_the_same_share(other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
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


def test_another_update_freq_has_the_rest() -> None:
    for length, begin, size, skip in itertools.product(range(1, 12), range(1, 10), range(1, 5), (False, True)):
        left = list(range(begin, length))
        batches = CountingIterator(left, start=begin)
        updates = GroupedIterator(batches, size, skip)
        found = list(updates)
        whole = len(left) // size * size  # an incomplete update is skipped where there is a complete one
        assert list(itertools.chain(*found)) == (left[:whole] if skip and whole else left)
        assert {len(each) for each in found[:-1]} <= {size}
        assert not batches.has_next()
        assert updates.n == len(updates)


def test_two_processes_go_on_for_one(data: Path, tmp_path: Path) -> None:
    """One batch in an update before, six after; the seventh comes twice."""
    before = train(data, tmp_path, "convs2s_tiny", "--max-update", 7)
    batches = before["extra_state"]["train_iterator"]["batches"]
    options = words(data, "convs2s_tiny", "--ddp-backend", "legacy_ddp", "--update-freq", 3, "--max-epoch", 1)
    ended = [faults.finish(rank, tmp_path) for rank in fork(options, tmp_path)]
    assert updates(ended[0]) == 7 + math.ceil((batches - 6) / 6)
    assert ended[0]["extra_state"]["train_iterator"]["epoch"] == 2
