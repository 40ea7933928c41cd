"""Curves from fairseq's logs, and κ and α over the updates."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_plugins.cli import plot_branches
from fairseq_plugins.cli.plot_loss import Point, read_curve
from tests.cli.conftest import refused, tool


def log(path: Path, *lines: tuple[str, dict], hydra: bool = False) -> Path:
    """Write a log as fairseq-train or fairseq-hydra-train does."""
    form = "[2026-01-01 00:00:00,000][%s][INFO] - %s" if hydra else "2026-01-01 00:00:00 | INFO | %s | %s"
    noise = [("fairseq_cli.train", "{'_name': None}"), ("fairseq.trainer", "NOTE: {half} a"), ("valid", '{"epoch": 1')]
    text = [form % line for line in noise]
    text += [form % (name, json.dumps({"epoch": 1, **values})) for name, values in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def inner(loss: float, updates: int = 1) -> tuple[str, dict]:
    return "train_inner", {"update": 0.5, "loss": str(loss), "num_updates": str(updates)}


def valid(updates: int, loss: float) -> tuple[str, dict]:
    return "valid", {"valid_loss": str(loss), "valid_num_updates": str(updates)}


def epoch(updates: int, loss: float) -> tuple[str, dict]:
    return "train", {"train_loss": str(loss), "train_num_updates": str(updates)}


TEST = "test", {"test_loss": "6.5", "test_num_updates": "100", "test_nll_loss": "1"}
AGAIN = [inner(9), valid(100, 6), inner(8), valid(200, 5), inner(7.5), valid(200, 4.5), inner(7), valid(300, 4)]
FIRST, SECOND, END = inner(9, 50), inner(7, 90), valid(100, 6)


@pytest.mark.parametrize("hydra", [False, True])
@pytest.mark.parametrize(
    ("lines", "points"),
    [
        # The training loss is the mean over the updates since the previous validation.
        ([FIRST, SECOND, END, epoch(100, 7.7), inner(5), valid(200, 4)], [Point(100, 6, 8), Point(200, 4, 5)]),
        # If no part is called valid, another part is used.
        ([FIRST, epoch(60, 9.5), TEST], [Point(100, 6.5, 9)]),
        ([FIRST, epoch(60, 9.5), TEST, inner(7, 150), valid(200, 3)], [Point(200, 3, 8)]),
        # The log has epochs only.
        ([valid(8, 6), epoch(8, 7), valid(16, 5), epoch(16, 6)], [Point(8, 6, 7), Point(16, 5, 6)]),
        # With --log-file, fairseq repeats lines.
        ([FIRST, SECOND, SECOND, SECOND, END, END, epoch(100, 7.7), epoch(100, 7.7)], [Point(100, 6, 8)]),
        # If a resumed training repeats updates, the later lines count.
        (AGAIN, [Point(100, 6, 9), Point(200, 4.5, 7.5), Point(300, 4, 7)]),
    ],
)
def test_points(tmp_path: Path, lines: list[tuple[str, dict]], points: list[Point], hydra: bool) -> None:
    assert read_curve(log(tmp_path / "log", *lines, hydra=hydra)) == points


@pytest.mark.parametrize("half", ['{"epoch": 1, "loss": "2"', '{"epoch":', "x"])
def test_a_long_line_of_incomplete_records_takes_little_time(tmp_path: Path, half: str) -> None:
    """The time grows linearly with the line's length."""
    line, began = f"{half * 60_000}}}", time.process_time()
    broken = log(tmp_path / "log", valid(100, 4))
    broken.write_text(f"{broken.read_text()}{line}\n")
    assert read_curve(broken)[0].validation == 4
    assert time.process_time() - began < 1


def test_a_plot_of_runs_and_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    one = log(tmp_path / "one", valid(100, 6), inner(5), valid(200, 5), valid(300, 5.5))
    two = log(tmp_path / "two", inner(9), valid(100, math.nan), valid(200, 4))
    output = tmp_path / "picture.svg"
    name = r"_a, $\frac$"  # matplotlib would read this as a formula
    tool("plot-loss", one, "--run", name, one, two, "--output", output)
    assert "<!-- a, " in output.read_text(encoding="utf-8")
    best = f"{one}: 5.000 at update 200\n{name}: 5.000 at update 200, 4.000 at update 200\n{output}\n"
    assert capsys.readouterr().out == best


def test_logs_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    one, two, empty = log(tmp_path / "one", valid(1, 6)), log(tmp_path / "two", valid(2, 6)), log(tmp_path / "empty")
    for arguments, name in (
        ([], "LOG"),
        (["--run", "name"], "--run name"),
        ([log(tmp_path / "diverged", valid(1, math.nan), valid(2, math.inf))], "diverged"),
        ([empty], "empty"),
        (["--run", "name", one, two], "name"),
        (["--run", "name", one, "--run", "name", two], "--run name"),
    ):
        assert name in refused("plot-loss", *arguments, "--output", tmp_path / "x.png")


def test_a_folder_with_a_training_without_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainings with at least one validation are drawn; malformed and unrelated lines are skipped."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    young = log(tmp_path / "new" / "train.log", inner(9))
    assert str(tmp_path) in refused("plot-loss", tmp_path, "--output", tmp_path / "x.png")
    old = log(tmp_path / "old" / "train.log", inner(9), valid(100, 6))
    with old.open("a") as file:
        file.write('{"epoch": 1, "upd{"epoch": 1}\n{"epoch": 1, "valid_loss": "5"}\n')
        file.write('{"epoch": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
        for loss, updates in (("null", "2"), ("[1]", "1"), ("1", "1e999"), ("1", "NaN"), ('"x"', "{}")):
            file.write(f'{{"epoch": 1, "valid_loss": {loss}, "valid_num_updates": {updates}}}\n')
    tool("plot-loss", tmp_path, "--output", tmp_path / "x.png")
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{old}: 6.000 at update 100\n")
    assert str(young) in printed.err


@pytest.mark.parametrize("loss", [1.79e308, -math.inf, math.nan])
def test_losses_out_of_range_are_not_drawn(loss, tmp_path, capsys) -> None:
    """Losses out of range may occur in validation or training, in one curve or in a mean."""
    one = log(tmp_path / "one", inner(4), valid(1, 3), inner(loss), valid(2, loss), inner(4), valid(3, 5))
    two = log(tmp_path / "two", inner(4), valid(1, loss), inner(3), valid(2, 2), valid(3, -loss))
    tool("plot-loss", one, "--run", "mean", one, two, "--output", tmp_path / "x.png")
    assert "mean: 3.000 at update 1, 2.000 at update 2\n" in capsys.readouterr().out


def save(folder: Path, update: int, constraint: str = "simplex") -> Path:
    point = torch.tensor([0.5, 0.3, 0.2]) if update < 5 else torch.tensor([0.7, 0.3, 0.0])
    layers = ("encoder.layers.1", "decoder.layers.10")
    model = {f"{layer}.branches.{vector}.weight": point for layer in layers for vector in ("kappa", "alpha")}
    path = folder / f"checkpoint_1_{update}.pt"
    args = Namespace(arch="weighted_transformer", task="translation", criterion="cross_entropy")
    args.branch_constraint = constraint
    history = [{"num_updates": update, "optimizer_name": "simplex_adam", "lr_scheduler_state": {}}]
    torch.save({"model": model, "args": args, "optimizer_history": history, "extra_state": {}}, path)
    return path


def test_checkpoints_are_sorted_by_update(tmp_path: Path) -> None:
    for update in (10, 2, 4):
        save(tmp_path, update)
    updates, vectors = plot_branches.read(plot_branches.list_files([tmp_path]), "encoder.1")
    assert updates == [2, 4, 10]
    assert list(vectors) == [("encoder", 1, "kappa"), ("encoder", 1, "alpha")]
    torch.testing.assert_close(vectors["encoder", 1, "kappa"][[0, 2]], torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.3, 0.0]]))


def test_checkpoints_of_two_trainings_are_refused(tmp_path: Path) -> None:
    """The best checkpoint may equal the last one; logits are plotted as weights."""
    first, copy = save(tmp_path, 2), tmp_path / "copy.pt"
    copy.write_bytes(first.read_bytes())
    assert plot_branches.read([first, copy], None)[0] == [2]
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other", 2, "softmax")
    with pytest.raises(ValueError, match="other/"):
        plot_branches.read([first, other], None)
    alpha = plot_branches.read([other], "encoder.1")[1]["encoder", 1, "alpha"]
    torch.testing.assert_close(alpha[0], torch.tensor([0.5, 0.3, 0.2]).softmax(dim=0))


def test_an_average_is_not_drawn_instead_of_its_last_checkpoint(tmp_path: Path) -> None:
    """The best checkpoint of own-data may be the average of the last epochs' checkpoints."""
    state = torch.load(save(tmp_path, 2), weights_only=False)
    weights = {name: value.flip(0) for name, value in state["model"].items()}
    torch.save({**state, "model": weights, "last_optimizer_state": None}, tmp_path / "checkpoint_best.pt")
    for folder, first in ((tmp_path, 0.5), (tmp_path / "checkpoint_best.pt", 0.2)):
        updates, vectors = plot_branches.read(plot_branches.list_files([folder]), "encoder.1")
        assert updates == [2]
        assert vectors["encoder", 1, "kappa"][0, 0] == pytest.approx(first)


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path, 2)
    save(tmp_path, 7)
    output = tmp_path / "picture.png"
    tool("plot-branches", tmp_path, "--output", output)
    assert output.stat().st_size > 1000
    assert "--layer decoder.7" in refused("plot-branches", tmp_path, "--layer", "decoder.7", "--output", output)


@pytest.mark.parametrize("value", [torch.tensor([0.5, float("nan")]), torch.ones(0), torch.ones(2, 2)])
def test_malformed_weights_are_named(value: torch.Tensor, tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    state = torch.load(path, weights_only=False)
    state["model"]["encoder.layers.1.branches.kappa.weight"] = value
    torch.save(state, path)
    assert "checkpoint_1_2.pt: encoder" in refused("plot-branches", path, "--output", tmp_path / "x.png")
