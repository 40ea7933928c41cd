"""What fairseq's data sets and batches do between epochs and versions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from fairseq.data import ConcatDataset, FairseqDataset, bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset
from fairseq.tasks import FairseqTask

from fairseq_plugins.repairs.wrapping import in_place_of, raises, silently


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
    with silently():
        first, later = (get(FairseqTask(None), Shuffled(), epoch=epoch).frozen_batches for epoch in (1, 2))
    return bool(first != later)


class Long(Shuffled):
    """The same sentences for another probe, each of three tokens."""

    sizes = np.full(16, 3)

    def batch_by_size(self, indices: Any, **options: Any) -> Any:
        return data_utils.batch_by_size(indices, lambda _: 3, **options)


def fails_at_a_sentence_beyond_a_batch(get: Callable[..., Any]) -> bool:
    """Probe: whether ``get`` fails at sentences of more tokens than a batch has, where too long ones are skipped."""
    with silently(logging.WARNING):
        return raises(AssertionError, lambda: get(FairseqTask(None), Long(), max_tokens=2, ignore_invalid_inputs=True))


def at_most(positions: Any, tokens: int) -> Any:
    """Limit maximum positions, a number or several, to a number of tokens."""
    if isinstance(positions, Mapping):
        return {name: at_most(each, tokens) for name, each in positions.items()}
    if isinstance(positions, tuple | list):
        return tuple(at_most(each, tokens) for each in positions)
    return tokens if positions is None else min(positions, tokens)


def keep_the_batches_on_resume() -> None:
    """One wrapper of what makes batches, for two things.

    fairseq makes the batches for all epochs by the number of the epoch in which the process starts, so a training that
    was stopped goes on with other batches: some sentences come twice in its epoch, others never.  Here they are always
    those of a process that started in the first epoch.  And a sentence of more than ``--max-tokens`` is too long, and
    skipped where others that are too long are: fairseq ends at it with an assertion.
    """
    get = FairseqTask.get_batch_iterator
    changes, fails = makes_other_batches_in_a_later_epoch(get), fails_at_a_sentence_beyond_a_batch(get)
    if not changes and not fails:
        return
    signature = inspect.signature(get)

    @in_place_of(FairseqTask, "get_batch_iterator")
    def get_batch_iterator(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        task, dataset, epoch = given["self"], given["dataset"], given["epoch"]
        if given["ignore_invalid_inputs"] and given["max_tokens"] is not None:
            given["max_positions"] = at_most(given["max_positions"], given["max_tokens"])
        made_anew = given["disable_iterator_cache"] or given["update_epoch_batch_itr"]
        if made_anew or not task.can_reuse_epoch_itr(dataset) or dataset in task.dataset_to_epoch_iter:
            return get(*call.args, **call.kwargs)
        given["epoch"] = 1
        epoch_itr = get(*call.args, **call.kwargs)
        epoch_itr.epoch = epoch
        dataset.set_epoch(epoch)
        return epoch_itr


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

    def get_buckets(sizes: Any, num_buckets: int) -> Any:
        return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])

    for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
        in_place_of(module, "get_buckets")(get_buckets)


def read_several_parts() -> None:
    """``train1.*`` beside ``train.*`` in DATA_BIN fails ("negative dimensions") without ``--upsample-primary``: fairseq
    repeats the first part -1 times.

    It is read once.
    """
    init = ConcatDataset.__init__
    if ConcatDataset([[0]], [-1]).cumulative_sizes[0] == 1:  # the probe: fairseq reads it once
        return

    @in_place_of(ConcatDataset, "__init__")
    def concatenate(self: Any, datasets: Any, sample_ratios: Any = 1) -> None:
        if isinstance(sample_ratios, list):
            sample_ratios = [1 if ratio == -1 else ratio for ratio in sample_ratios]
        init(self, datasets, sample_ratios)


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

    @in_place_of(data_utils, "batch_by_size")
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
        indices = np.asarray(indices)
        batches = divide(indices, *args, **kwargs) if len(indices) else []
        if kwargs.get("fixed_shapes") is None:  # whose batches have no order to go by
            rest = indices[sum(map(len, batches)) :]
            batches = [*batches, rest] if len(rest) else batches
        return batches
