"""Training of the Weighted Transformer with fairseq's trainer, in all cases in which κ and α could be lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from tests.commands import QUIET, USER_DIR, load_checkpoint, run, train_two_processes_as_one

MODEL = ["--arch", "weighted_transformer_tiny", "--criterion", "weighted_label_smoothed_cross_entropy"]
MODEL += ["--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32"]
MODEL += ["--encoder-attention-heads", "4", "--label-smoothing", "0.1", "--clip-norm", "1"]
MODEL += ["--optimizer", "simplex_adam", "--lr-scheduler", "weighted_inverse_sqrt"]
MODEL += ["--warmup-updates", "4", "--branch-warmup-updates", "2", "--batch-size", "16"]  # an epoch has four updates


def train(data: Path, save: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return run("train", data, "--user-dir", USER_DIR, "--save-dir", save, *MODEL, *QUIET, *options)


def branch_weights(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in model.items() if ".kappa." in name or ".alpha." in name}
    assert len(found) == 4  # one layer on each side
    return found


def assert_on_simplex(model: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for value in branch_weights(model).values():
        assert float(value.min()) >= 0
        assert float(value.float().sum()) == pytest.approx(1, abs=tolerance)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs with moving averages and a checkpoint after each update."""
    folder = tmp_path_factory.mktemp("trained")
    train(data, folder, "--max-epoch", 2, "--save-interval-updates", 1, "--store-ema", "--ema-decay", 0.5)
    return folder


def test_weights_move_and_stay_on_the_simplex(trained: Path) -> None:
    """κ and α are on the simplex in each checkpoint, in the moving average, and in an average of checkpoints."""
    paths = [trained / f"checkpoint{name}.pt" for name in ("_1_1", "_1_2", "_1_3", 1, "_2_5", "_2_6", "_2_7", 2)]
    checkpoints = [load_checkpoint(path) for path in paths]
    models = [checkpoint["model"] for checkpoint in checkpoints]
    for model in models + [checkpoint["extra_state"]["ema"] for checkpoint in checkpoints]:
        assert_on_simplex(model)
    assert_on_simplex({name: sum(model[name] for model in models) / len(models) for name in models[0]})
    for name, first in branch_weights(models[0]).items():
        assert not torch.equal(first, models[-1][name])


def test_a_resumed_training_is_bit_equal(data: Path, trained: Path, tmp_path: Path) -> None:
    """The stop is within an epoch, with dropout; model, moments and moving average are bit-equal."""
    options = ["--max-update", 4, "--store-ema", "--ema-decay", 0.5]
    train(data, tmp_path, *options, "--restore-file", trained / "checkpoint_1_2.pt")
    straight, resumed = load_checkpoint(trained / "checkpoint1.pt"), load_checkpoint(tmp_path / "checkpoint_last.pt")
    for name, value in straight["model"].items():
        assert torch.equal(resumed["model"][name], value), name
        assert torch.equal(resumed["extra_state"]["ema"][name], straight["extra_state"]["ema"][name]), name
    for index, moments in straight["last_optimizer_state"]["state"].items():
        for name, value in moments.items():
            other = resumed["last_optimizer_state"]["state"][index][name]
            assert torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (index, name)
    groups = [each["last_optimizer_state"]["param_groups"] for each in (straight, resumed)]
    assert groups[0] == groups[1]  # the rates, and the updates at which freezing begins


def test_frozen_from_an_update_on(data: Path, tmp_path: Path) -> None:
    options = ["--freeze-branch-weights-after", 3, "--max-epoch", 2, "--save-interval-updates", 1]
    train(data, tmp_path, *options)
    files = {2: "checkpoint_1_2.pt", 3: "checkpoint_1_3.pt", 8: "checkpoint_last.pt"}
    models = {update: load_checkpoint(tmp_path / file)["model"] for update, file in files.items()}
    before, frozen, last = (branch_weights(models[update]) for update in (2, 3, 8))
    assert all(torch.equal(frozen[name], last[name]) for name in frozen)
    assert not all(torch.equal(before[name], frozen[name]) for name in frozen)
    assert not torch.equal(
        models[3]["encoder.layers.0.branches.first.weight"], models[8]["encoder.layers.0.branches.first.weight"]
    )


@pytest.mark.parametrize(
    "precision",
    [
        ["--bf16"],
        ["--memory-efficient-bf16"],
        ["--fp16", *([] if not torch.cuda.is_available() else ["--fp16-no-flatten-grads"]), "--fp16-init-scale", 4],
        ["--memory-efficient-fp16", "--fp16-init-scale", 4],
    ],
    ids=lambda options: options[0].strip("-"),
)
@pytest.mark.slow
def test_half_precision(data: Path, tmp_path: Path, precision: list[object]) -> None:
    train(data, tmp_path, *precision, "--max-epoch", 2, "--save-interval-updates", 1)
    first, last = load_checkpoint(tmp_path / "checkpoint_1_1.pt"), load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 8
    assert_on_simplex(last["model"], tolerance=0.01)
    for name, value in branch_weights(last["model"]).items():
        assert not torch.equal(value, first["model"][name])


def test_two_processes_are_one_with_twice_the_update_frequency(data: Path, tmp_path: Path) -> None:
    common = [data, "--user-dir", USER_DIR, *MODEL, *QUIET, "--dropout", 0, "--attention-dropout", 0, "--max-epoch", 2]
    assert_on_simplex(train_two_processes_as_one(tmp_path, *common)[2])


def test_hydra_train(data: Path, tmp_path: Path) -> None:
    """The schedule uses the sizes of the architecture, or its own defaults."""
    (tmp_path / "recipe.yaml").write_text(f"""\
# @package _group_
common: {{user_dir: {USER_DIR}, log_format: json}}
task: {{_name: translation, data: {data}}}
model: {{_name: weighted_transformer_tiny, encoder_layers: 1}}
criterion: {{_name: weighted_label_smoothed_cross_entropy, label_smoothing: 0.1}}
optimizer: {{_name: simplex_adam, freeze_branch_weights_after: 2}}
lr_scheduler: {{_name: weighted_inverse_sqrt}}
dataset: {{batch_size: 16, num_workers: 0}}
optimization: {{max_update: 4}}
checkpoint: {{save_dir: {tmp_path / "save"}}}
""")
    run("hydra_train", "--config-dir", tmp_path, "--config-name", "recipe", f"hydra.run.dir={tmp_path / 'hydra'}")
    saved = load_checkpoint(tmp_path / "save" / "checkpoint_last.pt")
    assert_on_simplex(saved["model"])
    rates = {group["name"]: group["lr"] for group in saved["last_optimizer_state"]["param_groups"]}
    # These values are for the fifth update; the tiny model is 128 wide and has one layer here.
    assert rates["network"] == pytest.approx(128**-0.5 * 5 * 4000**-1.5)
    assert rates["branch_simplex"] == pytest.approx(128**-0.5 * 5 * 400**-1.5)


@pytest.mark.parametrize("mode", ["uniform", "random"])
def test_other_weights_at_test_time(data: Path, trained: Path, mode: str) -> None:
    """As in table 3, the trained model is tested with other κ and α."""
    checkpoint = str(trained / "checkpoint_last.pt")

    def load(**overrides: str) -> dict[str, torch.Tensor]:
        options = {"data": str(data), "user_dir": str(USER_DIR), **overrides}
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([checkpoint], arg_overrides=options)
        return model.state_dict()

    saved, plain, changed = load_checkpoint(Path(checkpoint))["model"], load(), load(branch_weights=mode)
    assert_on_simplex(changed)
    for name, value in saved.items():
        assert torch.equal(plain[name], value)
        if name in branch_weights(saved):
            assert not torch.equal(changed[name], value)
            assert (mode == "uniform") == bool((changed[name] == 0.25).all())
        elif name != "branch_weights_version":
            assert torch.equal(changed[name], value)


def test_an_invalid_option_is_named(data: Path) -> None:
    training = ["--arch", "weighted_transformer_tiny", "--optimizer", "simplex_adam", "--batch-size", 16, *QUIET]
    result = run("train", data, "--user-dir", USER_DIR, *training, "--adam-eps", "nan", "--no-save", succeeds=False)
    assert "--adam-eps" in result.stderr.splitlines()[-1]
