"""``fairseq-plugins average`` on checkpoints of a Weighted Transformer, whose state has all special cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from tests.cli.conftest import refused, tool
from tests.commands import QUIET, USER_DIR, load_checkpoint, run
from tests.repairs.payloads import untrained

MODEL = ["--arch", "weighted_transformer_tiny", "--encoder-layers", "1", "--encoder-embed-dim", "16"]
MODEL += ["--encoder-ffn-embed-dim", "32", "--criterion", "weighted_label_smoothed_cross_entropy"]
MODEL += ["--optimizer", "simplex_adam", "--lr-scheduler", "weighted_inverse_sqrt", "--warmup-updates", "4"]
MODEL += ["--branch-warmup-updates", "2", "--batch-size", "16"]  # an epoch has four updates


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three epochs, with checkpoints within epochs."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--max-epoch", 3, "--save-interval-updates", 3, "--clip-norm", 1]
    run("train", data, "--user-dir", USER_DIR, "--save-dir", folder, *MODEL, *QUIET, *options)
    return folder


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--last", "2"], ["checkpoint2.pt", "checkpoint3.pt"]),
        (["--last", "2", "--updates"], ["checkpoint_2_6.pt", "checkpoint_3_9.pt"]),
        (["checkpoint1.pt", "checkpoint_best.pt", "checkpoint_3_9.pt"],) * 2,
    ],
    ids=["epochs", "updates", "named"],
)
def test_parameters_are_the_plain_mean(data, trained, tmp_path, arguments, names) -> None:
    """Version numbers are copied, and averaged branch weights stay on the simplex."""
    inputs = [trained / name for name in names] if arguments == names else [trained, *arguments]
    tool("average", *inputs, "--output", tmp_path / "average.pt")
    averaged = load_checkpoint(tmp_path / "average.pt")
    models = [load_checkpoint(trained / name)["model"] for name in names]
    assert averaged["model"].keys() == models[0].keys()
    for name, value in averaged["model"].items():
        stack = torch.stack([model[name] for model in models])
        assert value.dtype == stack.dtype
        if value.is_floating_point():
            torch.testing.assert_close(value, stack.mean(0), msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert name in {"version", "branch_weights_version"}
            assert torch.equal(value, stack[0])
        if ".kappa." in name or ".alpha." in name:
            assert float(value.min()) >= 0
            assert float(value.sum()) == pytest.approx(1)
    assert averaged["last_optimizer_state"] is None
    checkpoint_utils.load_model_ensemble([str(tmp_path / "average.pt")], {"data": str(data)})


def test_double_precision_and_tied_parameters(data: Path, tmp_path: Path) -> None:
    """Doubles are averaged without loss; tied parameters stay tied."""
    paths = [tmp_path / f"{number}.pt" for number in range(3)]
    for number, path in enumerate(paths):
        tied = torch.nn.Parameter(torch.full((2,), float(number), dtype=torch.float64))
        # In single precision, a running sum of these numbers would equal the first number.
        model = {"one": tied, "other": tied, "single": torch.tensor([2.0**24 if number == 0 else 1.0])}
        extra = {"ema": model, "ema_fp32_params": model, "epoch": 1}
        torch.save({**untrained(data), "model": model, "extra_state": extra}, path)
    tool("average", *paths, "--output", tmp_path / "average.pt")
    averaged = load_checkpoint(tmp_path / "average.pt")
    means = {name: value.tolist() for name, value in averaged["model"].items()}
    assert means == {"one": [1, 1], "other": [1, 1], "single": [(2**24 + 2) / 3]}
    # The mean of moving averages is not the moving average of the mean.
    assert averaged["extra_state"].keys() == {"epoch", "train_iterator"}


@pytest.mark.parametrize(
    ("part", "name", "value", "difference"),
    [
        ("model", "version", torch.tensor(1), " version"),
        ("model", "version", None, " version"),
        ("model", "encoder.layers.0.branches.kappa.weight", torch.ones(2), "encoder.layers.0.branches.kappa.weight"),
        ("cfg", "branch_constraint", "softmax", "--branch-constraint"),
        ("cfg", "_name", "transformer", "architectures"),
        ("extra_state", "words", {"source": "0", "target": "0"}, "dictionaries"),
    ],
)
def test_checkpoints_of_different_models_are_refused(trained, tmp_path, part, name, value, difference) -> None:
    content = torch.load(trained / "checkpoint2.pt")
    place = content["cfg"]["model"] if part == "cfg" else content[part]
    place.update({name: value}) if value is not None else place.pop(name)
    other = tmp_path / "other.pt"
    torch.save(content, other)
    assert difference in refused("average", trained / "checkpoint1.pt", other, "--output", tmp_path / "average.pt")
    assert not (tmp_path / "average.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--last", "4"], "3 checkpoints"), (["--updates"], "--updates"), ([], "--last N"), (["--last", "0"], "--last")],
)
def test_wrong_options(trained: Path, tmp_path: Path, capsys, arguments: list[str], name: str) -> None:
    error = refused("average", trained, *arguments, "--output", tmp_path / "average.pt")
    assert name in error + capsys.readouterr().err


@pytest.mark.parametrize("model", [None, {}])
def test_a_checkpoint_without_an_architecture_is_refused(trained: Path, tmp_path: Path, model: object) -> None:
    content = torch.load(trained / "checkpoint1.pt")
    content["cfg"]["model"] = model
    torch.save(content, tmp_path / "odd.pt")
    assert "odd.pt" in refused("average", tmp_path / "odd.pt", "--output", tmp_path / "average.pt")


def test_code_in_a_checkpoint_is_refused_and_files_are_kept(trained: Path, tmp_path: Path) -> None:
    first, foreign, link = trained / "checkpoint1.pt", tmp_path / "foreign.pt", tmp_path / "link"
    torch.save({"model": print}, foreign)
    link.symlink_to("nowhere")
    before = first.read_bytes()
    for inputs, output, name in (
        ([first, foreign], tmp_path / "average.pt", foreign),
        ([first], first, first),
        ([first], link, link),
        ([first], tmp_path / "missing" / "average.pt", "missing"),
    ):
        assert str(name) in refused("average", *inputs, "--output", output)
    assert link.is_symlink()
    assert first.read_bytes() == before
