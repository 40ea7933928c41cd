"""Progress lines of a training."""

from __future__ import annotations

import json
import time

import pytest

from fairseq_plugins.cli.own_data.training import Progress, span


def progress(
    patience: int = 3,
    epochs: int = 0,
    updates: int = 0,
    *,
    usual: float = 6,
    metric: str = "loss",
    larger: bool = False,
) -> Progress:
    chosen = {"patience": patience, "max_epoch": epochs, "max_update": updates}
    chosen |= {"best_checkpoint_metric": metric, "maximize_best_checkpoint_metric": larger}
    return Progress(usual, chosen)


class Training:
    """A log in fairseq's format, with 10 updates per epoch and 2 seconds per update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *limits: int, usual: float = 6) -> None:
        self.now, self.best = 1000.0, 99.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.progress = progress(*limits, usual=usual)
        self.progress.see("2026-01-01 00:00:00 | INFO | fairseq.trainer | {'begin'} training epoch 1")

    def updates(self, done: int, **more: str) -> None:
        record = {"epoch": 1 + (done - 1) // 10, "update": round(done / 10, 3), "loss": "9", "num_updates": str(done)}
        self.now = 1000 + 2 * done
        self.progress.see(f"2026-01-01 00:00:00 | INFO | train_inner | {json.dumps({**record, **more})}\n")

    def validation(self, done: int, loss: float) -> None:
        record = {"epoch": 1 + (done - 1) // 10, "valid_loss": str(loss), "valid_num_updates": str(done)}
        if self.best < 99:
            record["valid_best_loss"] = str(min(loss, self.best))
        self.best = min(loss, self.best)
        self.now = 1000 + 2 * done
        self.progress.see(f"2026-01-01 00:00:00 | INFO | valid | {json.dumps(record)}\n")


def test_a_training_that_ends_by_patience(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate is extended while the training improves, until its patience ends."""
    training = Training(monkeypatch)
    training.updates(3)
    training.updates(6)
    training.validation(10, 9.5)
    training.validation(20, 9)
    for epoch, loss in ((6, 8), (7, 7), (8, 7.5), (10, 7.25)):
        training.validation(10 * epoch, loss)
    assert capsys.readouterr().err.splitlines() == [
        "One epoch has 10 updates and takes 20 s; about 2 min left.",
        "epoch 1, update 10: validation loss 9.500, the best so far; about 2 min left",
        "epoch 2, update 20: validation loss 9.000, the best so far; about 80 s left",
        "epoch 6, update 60: validation loss 8.000, the best so far; about 60 s left",
        "epoch 7, update 70: validation loss 7.000, the best so far; about 60 s left",
        "epoch 8, update 80: validation loss 7.500, the best is 7.000; about 40 s left",
        "epoch 10, update 100: validation loss 7.250, the best is 7.000; about 20 s left",
    ]


@pytest.mark.parametrize(
    ("limits", "left"),
    [((3, 2, 0), "; about 20 s left"), ((-1, 0, 16), "; about 12 s left"), ((-1, 0, 0), ""), ((3, 1, 0), "")],
)
def test_a_training_that_ends_otherwise(
    limits: tuple[int, int, int], left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(monkeypatch, *limits)
    training.updates(5)
    training.validation(10, 9.5)
    assert capsys.readouterr().err == f"epoch 1, update 10: validation loss 9.500, the best so far{left}\n"


def test_long_epochs_are_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The remaining time is printed only if the usual number of epochs is known."""
    for usual, left in ((20, "; about 2 min left"), (float("inf"), "")):
        training = Training(monkeypatch, 5, usual=usual)
        for done in (100, 101, 102, 131):  # 60 seconds
            training.updates(done)
        assert capsys.readouterr().err.splitlines()[1:] == [f"epoch 14, update 131{left}"]


def test_odd_lines_end_no_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines whose share of an epoch is rounded to 0, incomplete lines and lines without a number are skipped."""
    training = Training(monkeypatch)
    training.updates(1, update="0.0")
    for line in ('{"epoch": 1, "upd{"epoch": 1}\n', '{"epoch": 1, "update": 0.5, "loss": "9"}\n', "x" * 200_000):
        training.progress.see(line)
    assert capsys.readouterr().err == ""
    left_out = "x | WARNING | fairseq.tasks.fairseq_task | 1,204 samples have invalid sizes and will be skipped, max"
    training.progress.see(f"{left_out}_positions=(1024, 1024), first few sample ids=[3]\n")
    assert capsys.readouterr().err == "Skipped sentence pairs, too long for the model: 1,204.\n"
    assert [span(seconds) for seconds in (41.4, 99, 100, 5940, 6000)] == [
        "41 s",
        "99 s",
        "2 min",
        "99 min",
        "1.7 hours",
    ]


@pytest.mark.parametrize(("larger", "best"), [(True, "0.200"), (False, "0.100")])
def test_the_best_by_another_metric(larger: bool, best: str, capsys: pytest.CaptureFixture[str]) -> None:
    """fairseq's record of the best value is used, also that of the resumed training."""
    told = progress(metric="f1", larger=larger)

    def see(epoch: int, f1: object, **more: object) -> str:
        record = {"epoch": epoch, "valid_loss": str(9 - epoch), "valid_f1": str(f1), "valid_num_updates": str(epoch)}
        told.see(f"x | INFO | valid | {json.dumps({**record, **more})}\n")
        return capsys.readouterr().err

    assert see(1, 0.1) == "epoch 1, update 1: validation loss 8.000, f1 0.100, the best so far\n"
    assert see(2, 0.2).endswith("the best so far\n" if larger else "the best is 0.100\n")
    assert see(3, 0.15) == f"epoch 3, update 3: validation loss 6.000, f1 0.150, the best is {best}\n"
    assert see(3, best).endswith(f"f1 {best}, the best is {best}\n"), "an equal value costs patience, too"
    assert see(3, 0.15, valid_best_f1="0.5" if larger else "0.0").endswith(f"is {'0.500' if larger else '0.000'}\n")
