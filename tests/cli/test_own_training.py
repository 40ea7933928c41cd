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
from fairseq_plugins.cli.own_data.progress import Progress
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


def train(data: Path, save: Path, *wishes: str, **options: Any) -> own_training.Training:
    """Train a tiny model, unless the options say otherwise."""
    training = own_training.Training("convs2s_tiny", save, [*shlex.split(TINY), *wishes], **options)
    training.run(data, data.parent / "train.tgt", ["-s", "src", "-t", "tgt"])
    return training


@pytest.mark.parametrize(
    ("model", "size", "options"),
    [
        (ConvS2SModel, (29_000, 420_000), "--max-tokens 1500 --dropout 0.3 --clip-norm 1 --lr 0.004"),
        (ConvS2SModel, (36_000, 1_300_000), "--max-tokens 1500 --dropout 0.2 --clip-norm 1"),
        (TranslationModel, (4_500_000, 130_000_000), "--max-tokens 4000 --dropout 0.1 --warmup-updates 4000"),
        (WeightedTransformerModel, (29_000, 420_000), "--optimizer simplex_adam --lr-scale 0.7 --warmup-updates 400"),
        (ConvEncoderModel, (36_000, 1_800_000), "--lr 0.0012 --warmup-updates 1201 --init-range 0.14"),
    ],
)
def test_training_settings(model: type[TranslationModel], size: tuple[int, int], options: str) -> None:
    settings = own_training.training_settings(model, *size)
    assert [option for option in options.split(" --") if option.removeprefix("--") not in settings] == []


def test_a_resumed_training_appends_to_its_log(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log keeps the format that plot-loss reads, whatever options the user gives."""
    curves, wishes = [], ["--log-format", "simple", "--best-checkpoint-metric", "nll_loss", "--max-epoch"]
    for epochs in ("1", "2"):
        train(data, tmp_path, *wishes, epochs)
        curves.append(read_curve(tmp_path / "train.log"))
    assert [len(curve) for curve in curves] == [1, 2]
    assert curves[1][:1] == curves[0]
    told = capsys.readouterr().err
    assert re.findall(r"^epoch (\d), .* nll_loss [\d.]+, the best so far", told, flags=re.MULTILINE) == ["1", "2"]
    assert re.findall(r"^Resumed after update (\d+)\.", told, flags=re.MULTILINE) == [str(curves[0][-1].updates)]
    assert re.findall(r"^Training ended by (.+)\.$", told, flags=re.MULTILINE) == ["--max-epoch 1", "--max-epoch 2"]
    train(data, tmp_path, *wishes, "2", "--max-update", "2")
    assert "Training ended" not in capsys.readouterr().err


@pytest.mark.parametrize("is_better", [True, False])
def test_the_average_of_the_last_epochs(
    is_better: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average replaces the best checkpoint only if its validation loss is lower."""
    validated, found = own_training.Training.validated, []

    def validate(*words: Any) -> float:
        found.append(validated(*words))
        return found[-1] - (1000 if is_better and len(found) == 1 else 0)

    monkeypatch.setattr(own_training.Training, "validated", validate)
    train(data, tmp_path, "--max-epoch", "3", "--keep-last-epochs", "2", fp32=True)
    models = [load_checkpoint(tmp_path / f"checkpoint{name}.pt")["model"] for name in ("_best", "2", "3")]
    for name, value in models[0].items():
        expected = (models[1][name] + models[2][name]) / 2 if is_better else models[2][name]
        torch.testing.assert_close(value, expected.to(value.dtype))
    assert found[1] == pytest.approx(min(point.validation for point in read_curve(tmp_path / "train.log")), abs=2e-3)
    assert not (tmp_path / "checkpoint_average.pt").exists()


@pytest.mark.parametrize(("wishes", "left"), [("", 0), ("--keep-last-epochs 9", 3), ("--no-epoch-checkpoints", 0)])
def test_checkpoints_of_epochs_that_are_left(wishes: str, left: int, data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, "--max-epoch", "3", *wishes.split())
    assert len(numbered_checkpoints(tmp_path)) == left


def test_a_training_that_leaves_no_model_is_not_finished(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt"):
        train(data, tmp_path, "--save-interval", "9")


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
    for fp32 in (True, False):
        save = tmp_path / f"save{fp32}"
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fp32=fp32: not fp32)
        train(data, save, "--max-epoch", "1")
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fp32=fp32: fp32)
        (save / "checkpoint_last.pt").rename(save / "checkpoint_other.pt")
        (save / "checkpoint_best.pt").unlink()
        assert ("--bf16" in own_training.Training("convs2s_tiny", save, []).settings(9, 9)) != fp32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert "--bf16" not in own_training.Training("convs2s_tiny", tmp_path / "new", [], fp32=True).settings(9, 9)
    for has_gpu, options in ((False, ["--fp16"]), (True, ["--fp16", "--cpu"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(ValueError, match="needs a GPU"):
            train(data, tmp_path / "half", *options)
    for folder, more in ((save, []), (tmp_path / "new", ["--bf16"])):
        with pytest.raises(ValueError, match=r"--fp32: .*--bf16"):
            own_training.Training("convs2s_tiny", folder, more, fp32=True).settings(9, 9)


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
    with pytest.raises(ValueError, match="--train: --lr-scheduler inverse_sqrt "):
        own_training.Training("weighted_transformer_tiny", tmp_path, wishes)
    own_training.Training("weighted_transformer_tiny", tmp_path, [*wishes, "--lr", "0.001"])
    own_training.Training("weighted_transformer_tiny", tmp_path, [])


def test_options_that_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_training, "find_spec", lambda name: name == "tensorboardX" or None)
    own_training.Training("convs2s_tiny", tmp_path, ["--tensorboard-logdir", "runs"])
    with pytest.raises(ValueError, match="--wandb-project"):
        own_training.Training("convs2s_tiny", tmp_path, ["--wandb-project", "mine"])


def test_the_duration_of_a_training_is_printed_if_it_is_known() -> None:
    """With own-data's dropout, estimates are within a sixth of measured epochs."""
    for pairs, dropout, best in ((2000, 0.3, 13), (5000, 0.3, 20), (29_000, 0.3, 52), (37_000, 0.2, 28)):
        assert ConvS2SModel.usual_epochs(pairs, dropout) == pytest.approx(best, rel=1 / 6)
    for model, pairs in ((ConvEncoderModel, 2000), (ConvS2SModel, 200_000)):
        assert model.usual_epochs(pairs, 0.3) == float("inf")


class Training:
    """A log in fairseq's format, with 10 updates per epoch and 2 seconds per update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *limits: int, usual: float = 6) -> None:
        self.now = 1000.0
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

    def validation(self, done: int, loss: float, **more: str) -> None:
        self.log("valid", done, {"valid_loss": str(loss), "valid_num_updates": str(done), **more})


def test_a_training_that_ends_by_patience(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate is extended while the training improves, until its patience ends."""
    training = Training(monkeypatch, 3, 0, 0)
    training.updates(3)
    training.updates(6)
    for epoch, loss in ((1, 9.5), (2, 9), (6, 8), (7, 7), (8, 7.5)):
        training.validation(10 * epoch, loss)
    left = re.findall(r"; about (.*) left", capsys.readouterr().err)
    assert left == ["2 min", "2 min", "80 s", "60 s", "60 s", "40 s"]
    training.validation(100, 7.25, valid_best_loss="6.5")  # before the training was resumed
    assert re.search(r"epoch 10, update 100: .* 7\.250, .* 6\.500; about 20 s left\n$", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("limits", "expected"), [((3, 2, 0), ["20 s"]), ((-1, 0, 16), ["12 s"]), ((-1, 0, 0), []), ((3, 1, 0), [])]
)
def test_the_time_left_until_the_nearest_limit(limits, expected, monkeypatch, capsys) -> None:
    training = Training(monkeypatch, *limits)
    training.updates(5)
    training.validation(10, 9.5)
    assert re.findall(r"; about (.*) left", capsys.readouterr().err) == expected


def test_long_epochs_are_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The remaining time is printed only if the usual number of epochs is known."""
    for usual, expected in ((20, "; about 2 min left"), (float("inf"), "")):
        training = Training(monkeypatch, 5, 0, 0, usual=usual)
        for done in (100, 101, 102, 131):  # 60 seconds
            training.updates(done)
        assert capsys.readouterr().err.endswith(f"\nepoch 14, update 131{expected}\n")


def test_odd_lines_end_no_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines whose share of an epoch is rounded to 0, incomplete lines and lines without a number are skipped."""
    training = Training(monkeypatch, 3, 0, 0)
    training.log("train_inner", 1, {"update": 0.0, "loss": "9", "num_updates": "1"})
    for line in ('{"epoch": 1, "upd{"epoch": 1}\n', '{"epoch": 1, "update": 0.5, "loss": "9"}\n', "x" * 200_000):
        training.progress.see(line)
    assert capsys.readouterr().err == ""
    training.progress.see("x | WARNING | fairseq.tasks | 1,204 samples have invalid sizes and will be skipped, max_\n")
    assert "1,204" in capsys.readouterr().err


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
    for each in ("Loaded checkpoint base/checkpoint_best.pt (epoch 7 @ 0 updates)", line, "done training in 7.5 s"):
        training.progress.see(f"x | INFO | fairseq_cli.train | {each}\n")
    assert capsys.readouterr().err == f"Training ended by {expected}.\n"
