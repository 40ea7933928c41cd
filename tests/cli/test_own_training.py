"""own-data's training: its options, its end, and its output."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fairseq_plugins.cli.own_data import training as own_training
from fairseq_plugins.cli.plot_loss import read_curve
from fairseq_plugins.common.model import TranslationModel
from fairseq_plugins.conv_encoder import ConvEncoderModel
from fairseq_plugins.convs2s import ConvS2SModel
from fairseq_plugins.weighted_transformer import WeightedTransformerModel
from tests.cli.test_own_data import TINY
from tests.commands import run


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trainings in forked processes, so that fairseq is imported only once."""

    def lines(command: str, *words: object, before: str) -> Iterator[str]:
        result = run(command, *words)
        yield from (result.stdout + result.stderr).splitlines(keepends=True)

    monkeypatch.setattr(own_training, "fairseq_lines", lines)


@pytest.mark.parametrize(
    ("model", "size", "options"),
    [
        # This is the recipe of examples/multi30k/conv_encoder.sh.
        (
            ConvS2SModel,
            (29_000, 420_000),
            "--max-tokens 1500 --dropout 0.2 --clip-norm 1 --adam-betas (0.9,0.98) --lr 0.004 --warmup-updates 100",
        ),
        (
            TranslationModel,
            (4_500_000, 130_000_000),
            "--max-tokens 4000 --dropout 0.1 --lr 0.00063 --warmup-updates 4000",
        ),
        (ConvEncoderModel, (29_000, 420_000), "--lr 0.004 --warmup-updates 100"),
        (WeightedTransformerModel, (29_000, 420_000), "--optimizer simplex_adam --warmup-updates 400"),
    ],
)
def test_training_settings(model: type[TranslationModel], size: tuple[int, int], options: str) -> None:
    settings = own_training.training_settings(model, *size)
    options += " --patience 5 --no-epoch-checkpoints"
    assert [option for option in options.split(" --") if option.removeprefix("--") not in settings] == []


def test_the_duration_of_a_training_is_printed_if_it_is_known() -> None:
    """Estimates are within a sixth of measured epochs; other families and large texts have no estimate."""
    for pairs, took in ((1800, 13), (4800, 16), (29_000, 24)):
        assert ConvS2SModel.usual_epochs(pairs) == pytest.approx(took, rel=1 / 6)
    for model, pairs in ((ConvEncoderModel, 2000), (ConvS2SModel, 200_000)):
        assert model.usual_epochs(pairs) == float("inf")


def test_a_training_that_leaves_no_model_is_not_finished(data: Path, tmp_path: Path) -> None:
    wishes = shlex.split(f"{TINY} --save-interval 9")
    training = own_training.Training("convs2s_tiny", tmp_path / "save", wishes)
    with pytest.raises(ValueError, match=r"--train: the training ended without .*/save/checkpoint_best\.pt"):
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
    training.run(data, data.parent / "train.tgt", [])
    told = capsys.readouterr().err
    assert "nothing is left to train" not in told  # fairseq itself handles --max-epoch
    training = own_training.Training("convs2s_tiny", tmp_path / "save", [*wishes, "--max-update", "2"])
    training.run(data, data.parent / "train.tgt", [])
    assert re.search(r"^nothing is left to train: \d+ updates", capsys.readouterr().err, flags=re.MULTILINE)
    told_of = re.findall(r"^epoch (\d), .* loss [\d.]+, nll_loss [\d.]+, the best so far", told, flags=re.MULTILINE)
    assert told_of == ["1", "2"]
    assert "it stops after 5 validations in a row without improvement or 2 epochs." in told


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
    [
        ("", "fp16"),
        ("--memory-efficient-fp16", "fp16"),
        ("--bf16", "bf16"),
        ("--memory-efficient-bf16", "bf16"),
        ("--amp", "amp"),
        ("--cpu", "cpu"),
    ],
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


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_is_the_default_on_a_cpu_with_bfloat16_products(
    has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without bfloat16 products trains in float32 by default, and so does any CPU with --fp32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    for fp32 in (False, True):
        training = own_training.Training("convs2s_tiny", tmp_path, [], fp32=fp32)
        assert ("--bf16" in training.settings(9, 9)) == (has and not fp32)


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
        with pytest.raises(ValueError, match=f"{wishes[0]} needs the package {package}: pip install {package}"):
            own_training.Training("convs2s_tiny", tmp_path, wishes)
