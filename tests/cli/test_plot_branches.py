"""The plot of κ and α over the updates."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_plugins.cli import main as cli
from fairseq_plugins.cli import plot_branches


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
    """The best checkpoint may equal the last one."""
    first, copy = save(tmp_path, 2), tmp_path / "copy.pt"
    copy.write_bytes(first.read_bytes())
    assert plot_branches.read([first, copy], None)[0] == [2]
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other", 2, "softmax")
    with pytest.raises(ValueError, match="other/"):
        plot_branches.read([first, other], None)


def test_logits_are_plotted_as_weights(tmp_path: Path) -> None:
    _, vectors = plot_branches.read([save(tmp_path, 2, "softmax")], "encoder.1")
    torch.testing.assert_close(vectors["encoder", 1, "alpha"][0], torch.tensor([0.5, 0.3, 0.2]).softmax(dim=0))


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot_is_written(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path, 2)
    save(tmp_path, 7)
    output = tmp_path / f"picture.{kind}"
    cli.main(["plot-branches", str(tmp_path), "--output", str(output)])
    assert output.stat().st_size > 1000
    assert "2 checkpoints, updates 2 to 7" in capsys.readouterr().out


def test_the_legend_has_all_branches(tmp_path: Path) -> None:
    """The legend includes the branches of the decoder, which may be more than the encoder's."""
    pytest.importorskip("matplotlib")
    sides = {"encoder": torch.ones(2, 2), "decoder": torch.ones(2, 5)}
    vectors = {plot_branches.Vector(side, 0, "kappa"): values for side, values in sides.items()}
    plot_branches.draw([1, 2], vectors, tmp_path / "picture.svg")
    assert "<!-- branch 5 -->" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


def test_missing_files_and_weights_are_named(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for arguments, message in (
        ([tmp_path, "--layer", "decoder.7"], "no branch weights for --layer decoder.7"),
        ([tmp_path / "nowhere.pt"], "nowhere.pt: no checkpoint found"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["plot-branches", *map(str, arguments), "--output", str(tmp_path / "x.png")])


@pytest.mark.parametrize(
    "value", [torch.tensor([0.5, float("nan")]), torch.tensor(1.0), torch.ones(0), torch.ones(2, 2)]
)
def test_malformed_weights_are_named(value: torch.Tensor, tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    state = torch.load(path, weights_only=False)
    state["model"]["encoder.layers.1.branches.kappa.weight"] = value
    torch.save(state, path)
    with pytest.raises(SystemExit, match=r"checkpoint_1_2\.pt: encoder\.layers\.1"):
        cli.main(["plot-branches", str(path), "--output", str(tmp_path / "x.png")])
