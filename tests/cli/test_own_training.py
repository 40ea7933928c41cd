"""own-data's training: its options, its end, its output, and its progress lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_plugins.cli.average import numbered_checkpoints
from fairseq_plugins.cli.own_data import training as own_training
from fairseq_plugins.cli.own_data.progress import Progress, counted, span
from fairseq_plugins.cli.plot_loss import read_curve
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.conv_encoder import ConvEncoderModel
from fairseq_plugins.convs2s import ConvS2SModel
from fairseq_plugins.weighted_transformer import WeightedTransformerModel
from tests.cli.test_own_data import TINY
from tests.commands import load_checkpoint, run


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trainings in forked processes, so that fairseq is imported only once."""

    def lines(command: str, *words: object, before: str = "") -> Iterator[str]:
        result = run(command, *words)
        yield from (result.stdout + result.stderr).splitlines(keepends=True)

    monkeypatch.setattr(own_training, "fairseq_lines", lines)


@pytest.mark.parametrize(
    ("model", "size", "options"),
    [
        (ConvS2SModel, (29_000, 420_000), "--max-tokens 1500 --dropout 0.3 --clip-norm 1 --lr 0.004"),
        (ConvS2SModel, (36_000, 1_300_000), "--max-tokens 1500 --dropout 0.2 --clip-norm 1"),
        (TranslationModel, (4_500_000, 130_000_000), "--max-tokens 4000 --dropout 0.1 --warmup-updates 4000"),
        (WeightedTransformerModel, (29_000, 420_000), "--optimizer simplex_adam --lr-scale 0.7 --warmup-updates 400"),
        (WeightedTransformerModel, (36_000, 1_800_000), "--warmup-updates 1201 --branch-warmup-updates 120"),
        (ConvEncoderModel, (36_000, 1_800_000), "--lr 0.0012 --warmup-updates 1201 --init-range 0.14"),
    ],
)
def test_training_settings(model: type[TranslationModel], size: tuple[int, int], options: str) -> None:
    settings = own_training.training_settings(model, *size)
    assert [option for option in options.split(" --") if option.removeprefix("--") not in settings] == []


def test_the_duration_of_a_training_is_printed_if_it_is_known() -> None:
    """With own-data's dropout, estimates are within a sixth of measured epochs."""
    for pairs, dropout, best in ((2000, 0.3, 13), (5000, 0.3, 20), (29_000, 0.3, 52), (37_000, 0.2, 28)):
        assert ConvS2SModel.usual_epochs(pairs, dropout) == pytest.approx(best, rel=1 / 6)
    for model, pairs in ((ConvEncoderModel, 2000), (ConvS2SModel, 200_000)):
        assert model.usual_epochs(pairs, 0.3) == float("inf")


def test_one_epoch_is_singular() -> None:
    assert [counted(number, "epoch") for number in (1, 2)] == ["1 epoch", "2 epochs"]


def test_a_missing_user_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--train: --user-dir .*missing "):
        own_training.Training("convs2s_tiny", tmp_path, ["--user-dir", str(tmp_path / "missing")])


def test_a_training_that_leaves_no_model_is_not_finished(data: Path, tmp_path: Path) -> None:
    wishes = shlex.split(f"{TINY} --save-interval 9")
    training = own_training.Training("convs2s_tiny", tmp_path / "save", wishes)
    with pytest.raises(ValueError, match=r"^--train: .*/save/checkpoint_best\.pt"):
        training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])


def test_a_resumed_training_appends_to_its_log(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log keeps the format that plot-loss reads, whatever options the user gives."""
    curves = []
    for epochs in (1, 2):
        wishes = [*shlex.split(TINY), "--max-epoch", str(epochs), "--log-format", "simple"]
        wishes += ["--best-checkpoint-metric", "nll_loss"]
        training = own_training.Training("convs2s_tiny", tmp_path / "save", wishes)
        training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])
        curves.append(read_curve(tmp_path / "save" / "train.log"))
    assert [len(curve) for curve in curves] == [1, 2]
    assert curves[1][:1] == curves[0]
    told_in_all = capsys.readouterr().err
    told = re.findall(r"^epoch (\d), .* nll_loss [\d.]+, the best so far", told_in_all, flags=re.MULTILINE)
    assert told == ["1", "2"]
    assert re.findall(r"^Resumed after update (\d+)\.", told_in_all, flags=re.MULTILINE) == [str(curves[0][-1].updates)]
    assert re.findall(r"^Training ended by (.+)\.$", told_in_all, flags=re.MULTILINE) == [
        "--max-epoch 1",
        "--max-epoch 2",
    ]
    training = own_training.Training("convs2s_tiny", tmp_path / "save", [*wishes, "--max-update", "2"])
    training.run(data, data.parent / "train.tgt", [])
    told_in_all = capsys.readouterr().err
    assert "nothing is left to train" in told_in_all
    assert "Training ended" not in told_in_all


@pytest.mark.parametrize("is_better", [True, False])
def test_the_average_of_the_last_epochs(
    is_better: bool, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average replaces the best checkpoint only if its validation loss is lower."""
    save, wishes = tmp_path / "save", [*shlex.split(TINY), "--max-epoch", "3", "--keep-last-epochs", "2"]
    training = own_training.Training("convs2s_tiny", save, wishes, fp32=True)
    validated, found = training.validated, []

    def validate(checkpoint: Path, *more: Any) -> float:
        found.append(validated(checkpoint, *more))
        return found[-1] - (1000 if is_better and len(found) == 1 else 0)

    monkeypatch.setattr(training, "validated", validate)
    training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])
    models = [load_checkpoint(save / f"checkpoint{name}.pt")["model"] for name in ("_best", "2", "3")]
    for name, value in models[0].items():
        expected = (models[1][name] + models[2][name]) / 2 if is_better else models[2][name]
        torch.testing.assert_close(value, expected.to(value.dtype))
    assert found[1] == pytest.approx(min(point.validation for point in read_curve(save / "train.log")), abs=2e-3)
    of_mean = found[0] - 1000 * is_better
    told = f"Validation loss: {found[1]:g} in the best epoch, {of_mean:g} for the average of 2 epochs"
    assert f"\n{told}{'; checkpoint_best.pt is the average' * is_better}.\n" in capsys.readouterr().err
    assert not (save / "checkpoint_average.pt").exists()


@pytest.mark.parametrize(("wishes", "left"), [("", 0), ("--keep-last-epochs 9", 3), ("--no-epoch-checkpoints", 0)])
def test_checkpoints_of_epochs_that_are_left(wishes: str, left: int, data: Path, tmp_path: Path) -> None:
    training = own_training.Training("convs2s_tiny", tmp_path, [*shlex.split(f"{TINY} --max-epoch 3 {wishes}")])
    training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])
    assert len(numbered_checkpoints(tmp_path)) == left


@pytest.mark.parametrize(
    ("wishes", "left_out"),
    [
        ("--criterion cross_entropy", {"--label-smoothing"}),
        ("--optimizer nag --momentum 0.99", {"--adam-betas"}),
        ("--lr-scheduler anneal_after_plateau", {"--warmup-updates"}),
        ("--optimizer=adafactor --lr-scheduler fixed --clip-norm 0.1", {"--adam-betas"}),
    ],
)
def test_another_criterion_optimizer_or_schedule(wishes: str, left_out: set[str], tmp_path: Path) -> None:
    """Options of the default criterion, optimizer or schedule are not passed to other ones."""
    chosen = own_training.training_settings(ConvS2SModel, 9, 9).split()
    kept = own_training.Training("convs2s_tiny", tmp_path, shlex.split(wishes)).settings(9, 9)
    assert {word for word in chosen if word.startswith("--")} - {*kept} == left_out
    assert own_training.Training("convs2s_tiny", tmp_path, ["--lr", "1"], fp32=True).settings(9, 9) == chosen


@pytest.mark.parametrize(
    ("wishes", "precision"),
    [("", "fp16"), ("--memory-efficient-fp16", "fp16"), ("--bf16", "bf16"), ("--amp", "amp"), ("--cpu", "cpu")],
)
def test_half_precision_is_the_default_on_a_gpu(
    wishes: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option chooses another precision; two precisions are an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    training = own_training.Training("weighted_transformer_tiny", tmp_path, wishes.split())
    chosen = own_training.parse(["DATA_BIN", *training.own, *training.settings(9, 9), *training.wishes])
    assert [name for name in ("fp16", "bf16", "amp", "cpu") if getattr(chosen, name)] == [precision]
    assert chosen.fp16_no_flatten_grads


def test_a_training_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """A resumed training keeps its precision on a machine with another default precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wishes = [*shlex.split(TINY), "--max-epoch", "1"]
    for fp32 in (True, False):
        save = tmp_path / f"save{fp32}"
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fp32=fp32: not fp32)
        training = own_training.Training("convs2s_tiny", save, wishes)
        training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fp32=fp32: fp32)
        (save / "checkpoint_last.pt").rename(save / "checkpoint_other.pt")
        (save / "checkpoint_best.pt").unlink()
        assert ("--bf16" in own_training.Training("convs2s_tiny", save, wishes).settings(9, 9)) != fp32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert "--bf16" not in own_training.Training("convs2s_tiny", tmp_path / "new", [], fp32=True).settings(9, 9)
    for folder, more in ((save, []), (tmp_path / "new", ["--bf16"])):
        with pytest.raises(ValueError, match=r"--fp32: .*--bf16"):
            own_training.Training("convs2s_tiny", folder, [*wishes, *more], fp32=True).settings(9, 9)


def test_the_newest_checkpoint_tells_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older checkpoints may have another precision, and names do not tell the age."""
    states = {}
    for age, (name, precision) in enumerate((("_last", "bf16"), ("1", "fp16"), ("_best", None))):
        path = tmp_path / f"checkpoint{name}.pt"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
        states[str(path)] = {"cfg": {"common": {each: each == precision for each in ("fp16", "bf16")}}}
    monkeypatch.setattr(own_training.checkpoint_utils, "load_checkpoint_to_cpu", states.__getitem__)
    for chosen in (["--bf16"], ["--fp16"], []):
        assert own_training.Training("convs2s_tiny", tmp_path, []).precision(on_gpu=True) == chosen
        max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime).unlink()


def test_another_schedule_needs_a_rate(tmp_path: Path) -> None:
    """The Weighted Transformer's schedule needs no rate; fairseq's default rate is too large for other schedules."""
    wishes = ["--lr-scheduler", "inverse_sqrt"]
    with pytest.raises(ValueError, match=r"--train: --lr-scheduler inverse_sqrt .* --lr"):
        own_training.Training("weighted_transformer_tiny", tmp_path, wishes)
    own_training.Training("weighted_transformer_tiny", tmp_path, [*wishes, "--lr", "0.001"])
    own_training.Training("weighted_transformer_tiny", tmp_path, [])


def test_options_that_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard, wandb = ["--tensorboard-logdir", "runs"], ["--wandb-project", "mine"]
    monkeypatch.setattr(own_training, "find_spec", lambda name: name == "tensorboardX" or None)
    own_training.Training("convs2s_tiny", tmp_path, tensorboard)
    monkeypatch.setattr(own_training, "find_spec", lambda name: None)
    for wishes, package in ((tensorboard, "tensorboard"), (wandb, "wandb")):
        with pytest.raises(ValueError, match=f"{wishes[0]} .*{package}"):
            own_training.Training("convs2s_tiny", tmp_path, wishes)


class Training:
    """A log in fairseq's format, with 10 updates per epoch and 2 seconds per update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *limits: int, usual: float = 6) -> None:
        self.now, self.best = 1000.0, 99.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        chosen = dict(zip(("patience", "max_epoch", "max_update"), limits, strict=True))
        chosen |= {"best_checkpoint_metric": "loss", "maximize_best_checkpoint_metric": False, "save_dir": "save"}
        self.progress = Progress(usual, chosen)
        self.progress.see("2026-01-01 00:00:00 | INFO | fairseq.trainer | {'begin'} training epoch 1")

    def log(self, part: str, done: int, record: dict[str, object]) -> None:
        self.now = 1000 + 2 * done
        record = {"epoch": 1 + (done - 1) // 10, **record}
        self.progress.see(f"2026-01-01 00:00:00 | INFO | {part} | {json.dumps(record)}\n")

    def updates(self, done: int) -> None:
        self.log("train_inner", done, {"update": done / 10, "loss": "9", "num_updates": str(done)})

    def validation(self, done: int, loss: float) -> None:
        best = {"valid_best_loss": str(min(loss, self.best))} if self.best < 99 else {}
        self.best = min(loss, self.best)
        self.log("valid", done, {"valid_loss": str(loss), "valid_num_updates": str(done), **best})


def left(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the estimates of the remaining time in all lines so far."""
    return [line.rstrip(".").rpartition("; about ")[2] for line in capsys.readouterr().err.splitlines()]


def test_a_training_that_ends_by_patience(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate is extended while the training improves, until its patience ends."""
    training = Training(monkeypatch, 3, 0, 0)
    training.updates(3)
    training.updates(6)
    for epoch, loss in ((1, 9.5), (2, 9), (6, 8), (7, 7), (8, 7.5)):
        training.validation(10 * epoch, loss)
    assert left(capsys) == [f"{time} left" for time in ("2 min", "2 min", "80 s", "60 s", "60 s", "40 s")]
    training.validation(100, 7.25)
    message = "epoch 10, update 100: validation loss 7.250, the best is 7.000; about 20 s left\n"
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((3, 2, 0), "20 s left"), ((-1, 0, 16), "12 s left"), ((-1, 0, 0), None), ((3, 1, 0), None)],
)
def test_a_training_that_ends_otherwise(limits, expected, monkeypatch, capsys) -> None:
    training = Training(monkeypatch, *limits)
    training.updates(5)
    training.validation(10, 9.5)
    without = "epoch 1, update 10: validation loss 9.500, the best so far"
    assert left(capsys) == [expected or without]


def test_long_epochs_are_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The remaining time is printed only if the usual number of epochs is known."""
    for usual, expected in ((20, "2 min left"), (float("inf"), "epoch 14, update 131")):
        training = Training(monkeypatch, 5, 0, 0, usual=usual)
        for done in (100, 101, 102, 131):  # 60 seconds
            training.updates(done)
        assert left(capsys)[1:] == [expected]


def test_odd_lines_end_no_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines whose share of an epoch is rounded to 0, incomplete lines and lines without a number are skipped."""
    training = Training(monkeypatch, 3, 0, 0)
    training.log("train_inner", 1, {"update": 0.0, "loss": "9", "num_updates": "1"})
    for line in ('{"epoch": 1, "upd{"epoch": 1}\n', '{"epoch": 1, "update": 0.5, "loss": "9"}\n', "x" * 200_000):
        training.progress.see(line)
    assert capsys.readouterr().err == ""
    left_out = "x | WARNING | fairseq.tasks.fairseq_task | 1,204 samples have invalid sizes and will be skipped, max"
    training.progress.see(f"{left_out}_positions=(1024, 1024), first few sample ids=[3]\n")
    assert "1,204" in capsys.readouterr().err
    spans = {41.4: "41 s", 99: "99 s", 100: "2 min", 5940: "99 min", 6000: "1.7 hours"}
    assert {seconds: span(seconds) for seconds in spans} == spans


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("early stop since valid performance hasn't improved for last 3 runs", "--patience 3"),
        ("Stopping training due to num_updates: 9 >= max_update: 9", "--max-update 9"),
        ("end of epoch 2 (average epoch stats below)", "--max-epoch 2"),
    ],
)
def test_the_option_that_ends_a_training_is_named(line, expected, monkeypatch, capsys) -> None:
    training = Training(monkeypatch, 3, 2, 9)
    training.progress.see(
        "x | INFO | fairseq.trainer | Loaded checkpoint base/checkpoint_best.pt (epoch 7 @ 0 updates)\n"
    )
    for each in (line, "done training in 7.5 seconds"):
        training.progress.see(f"x | INFO | fairseq_cli.train | {each}\n")
    assert capsys.readouterr().err == f"Training ended by {expected}.\n"


@pytest.mark.parametrize(("larger", "best"), [(True, "0.200"), (False, "0.100")])
def test_the_best_by_another_metric(larger: bool, best: str, capsys: pytest.CaptureFixture[str]) -> None:
    """fairseq's record of the best value is used, also that of the resumed training."""
    chosen = {"best_checkpoint_metric": "f1", "maximize_best_checkpoint_metric": larger}
    progress = Progress(6, {"patience": 3, "max_epoch": 0, "max_update": 0, **chosen})

    def see(epoch: int, f1: object, **more: object) -> str:
        record = {"epoch": epoch, "valid_loss": str(9 - epoch), "valid_f1": str(f1), "valid_num_updates": str(epoch)}
        progress.see(f"x | INFO | valid | {json.dumps({**record, **more})}\n")
        return capsys.readouterr().err

    assert see(1, 0.1).endswith("f1 0.100, the best so far\n")
    assert see(2, 0.2).endswith("the best so far\n" if larger else "the best is 0.100\n")
    assert see(3, best).endswith(f"f1 {best}, the best is {best}\n"), "an equal value costs patience, too"
    assert see(3, 0.15, valid_best_f1="0.5" if larger else "0.0").endswith(f"is {'0.500' if larger else '0.000'}\n")
