"""Training that is stopped, goes on and is started again, with the plugin's models."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import FairseqDataset
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.tasks import FairseqTask

from fairseq_plugins.repairs import resuming
from tests import faults


class Sentences(FairseqDataset):
    """Of random lengths, so that other batches are other groups of sentences."""

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
    """The batches of a process that starts in this epoch."""
    dataset = Sentences()
    epoch_itr = get(FairseqTask(None), dataset, max_tokens=20, seed=7, epoch=epoch, **options)
    assert epoch_itr.epoch == dataset.epoch == epoch
    return [list(map(int, batch)) for batch in epoch_itr.frozen_batches]


def test_a_later_start_keeps_the_batches() -> None:
    own = inspect.unwrap(FairseqTask.get_batch_iterator)
    assert batches(3) == batches(1) == batches(1, own)


def test_a_second_call_finds_the_batches_where_they_are() -> None:
    task, dataset = FairseqTask(None), Sentences()
    made = task.get_batch_iterator(dataset, max_tokens=20, epoch=3)
    made.epoch = 4
    assert task.get_batch_iterator(dataset, max_tokens=20, epoch=3) is made
    assert made.epoch == 4


@pytest.mark.parametrize("option", ["disable_iterator_cache", "update_epoch_batch_itr"])
def test_batches_of_one_epoch_are_fairseqs(option: str) -> None:
    """Those that are made anew for each epoch are the same wherever a process starts."""
    own = inspect.unwrap(FairseqTask.get_batch_iterator)
    assert batches(3, **{option: True}) == batches(3, own, **{option: True})


def test_killed_training_ends_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    """Parameters, optimizer, schedule: to the last bit; ``make faults`` does the same for longer."""
    counts = faults.survive(data, tmp_path, "convs2s_tiny", kills=3, epochs=3, seed=1)
    assert counts.total() == 3
    log = (tmp_path / "convs2s_tiny.disturbed" / "log").read_text()
    assert any(int(epoch) > 1 for epoch in re.findall(r"Loaded checkpoint .* \(epoch (\d+) @", log))


def train(data: Path, save: Path, *options: object) -> dict[str, Any]:
    words = [data, "--arch", "convs2s_tiny", *faults.FAMILIES["convs2s_tiny"].split(), *faults.COMMON, *options]
    return faults.finish(faults.start(words, save), save)


def updates(state: dict[str, Any]) -> int:
    return state["optimizer_history"][-1]["num_updates"]


def test_a_finished_training_is_left_alone(data: Path, tmp_path: Path) -> None:
    first = train(data, tmp_path, "--max-update", 4)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    train(data, tmp_path, "--max-update", 4)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    assert updates(first) == 4
    assert updates(train(data, tmp_path, "--max-update", 6)) == 6


def test_a_resumed_schedule_is_told_which_epoch_has_ended(data: Path, tmp_path: Path) -> None:
    """One without validation, in which the rate falls all the same: the metric is never better than at first."""
    options = ["--validate-interval", 2, "--best-checkpoint-metric", "bsz", "--save-interval-updates", 0]
    options += ["--max-tokens", 9999, "--max-epoch"]  # one update in each epoch
    rates = []
    for name, epochs in (("straight", [6]), ("resumed", [5, 6])):
        (tmp_path / name).mkdir()
        states = [train(data, tmp_path / name, *options, epoch) for epoch in epochs]
        rates.append(states[-1]["optimizer_history"][-1]["lr_scheduler_state"]["lr"])
    assert rates == pytest.approx([0.0025, 0.0025])


@pytest.mark.parametrize("reset", [None, "reset_lr_scheduler", "reset_optimizer"])
def test_a_schedule_that_begins_anew_is_told_nothing(reset: str | None) -> None:
    told = []
    trainer = SimpleNamespace(lr_step=lambda *given: told.append(given))
    cfg = CheckpointConfig(**({} if reset is None else {reset: True}))
    resuming.finish_the_epoch(cfg, trainer, SimpleNamespace(epoch=3, iterations_in_epoch=0), {"val_loss": 1.5})
    assert told == ([(2, 1.5)] if reset is None else [])


def test_the_next_training_of_a_process_starts_afresh() -> None:
    load = checkpoint_utils.load_checkpoint
    assert resuming.remembers_another_training(inspect.unwrap(load))
    began = []

    def begin(cfg: object, trainer: object) -> None:
        began.append(dict(vars(checkpoint_utils.save_checkpoint)))

    def repaired(cfg: object, trainer: object) -> None:
        del checkpoint_utils.save_checkpoint.best

    assert resuming.remembers_another_training(begin)
    assert began == [{"best": 0.0}]
    assert not resuming.remembers_another_training(repaired)


def test_patience_outlives_the_process(data: Path, tmp_path: Path) -> None:
    """At rate zero no validation is better than the first, and three of them end training."""
    options = ["--lr", 0, "--patience", 3]
    assert updates(train(data, tmp_path, *options, "--max-update", 3)) == 3  # validated once, and the best
    assert updates(train(data, tmp_path, *options, "--max-update", 9)) == 9  # two that are no better
    ended = train(data, tmp_path, *options, "--max-update", 99)
    assert updates(ended) == 12
    again = train(data, tmp_path, *options, "--max-update", 99)
    assert updates(again) == 12
    assert all(torch.equal(value, again["model"][name]) for name, value in ended["model"].items())
