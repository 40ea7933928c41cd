"""Training in half precision goes on from the float32 parameters of its checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import AMPOptimizer, FP16Optimizer, build_optimizer

from fairseq_plugins.repairs import precision
from tests import faults
from tests.repairs.test_distributed import fork

FP16 = ["--fp16-init-scale", 4, "--fp16-scale-window", 3]


def words(data: Path, architecture: str, *options: object) -> list[object]:
    return [data, "--arch", architecture, *faults.FAMILIES[architecture].split(), *faults.COMMON, *options]


def train(data: Path, save: Path, architecture: str, *options: object) -> dict[str, Any]:
    save.mkdir(exist_ok=True)
    return faults.finish(faults.start(words(data, architecture, *options), save), save)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = [{**faults.compared(each), "scale": each["extra_state"].get("loss_scale")} for each in (one, other)]
    assert not list(faults.differences(*found))


def rounded(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16().to(value.dtype) for name, value in state["model"].items()}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("weighted_transformer_tiny", ["--bf16"]),
        ("convs2s_tiny", ["--fp16", *FP16]),
        ("convs2s_tiny", ["--memory-efficient-fp16", *FP16]),
    ],
)
def test_a_stopped_training_ends_as_if_undisturbed(
    architecture: str, options: list[object], data: Path, tmp_path: Path
) -> None:
    """Parameters, optimizer, loss scale: to the last bit."""
    undisturbed = train(data, tmp_path / "straight", architecture, *options, "--max-update", 8)
    train(data, tmp_path / "stopped", architecture, *options, "--max-update", 5)
    assert_same(undisturbed, train(data, tmp_path / "stopped", architecture, *options, "--max-update", 8))
    assert "no float32 parameters" not in (tmp_path / "stopped" / "log").read_text()


def test_two_processes_go_on_as_if_undisturbed(data: Path, tmp_path: Path) -> None:
    options = words(data, "convs2s_tiny", "--bf16", "--ddp-backend", "legacy_ddp")
    ended = []
    for name, updates in (("straight", [6]), ("stopped", [3, 6])):
        (tmp_path / name).mkdir()
        for most in updates:
            ranks = fork([*options, "--max-update", most], tmp_path / name)
            states = [faults.finish(rank, tmp_path / name) for rank in ranks]
        ended.append(states[0])
    assert_same(*ended)


@pytest.mark.parametrize(
    ("before", "after"),
    [("--bf16", "--restore-file FILE --reset-optimizer"), ("--cpu", "--finetune-from-model FILE --bf16")],
)
def test_another_precision_begins_with_the_same_parameters(before: str, after: str, data: Path, tmp_path: Path) -> None:
    """At rate zero they stay as they were read."""
    trained = train(data, tmp_path / "trained", "convs2s_tiny", before, "--max-update", 3)
    assert list(faults.differences(trained["model"], rounded(trained)))
    start = str(tmp_path / "trained" / "checkpoint_last.pt")
    options = [*after.replace("FILE", start).split(), "--lr", 0, "--max-update", 1]
    found = train(data, tmp_path / "again", "convs2s_tiny", *options)
    assert not list(faults.differences(trained["model"], found["model"]))


@pytest.mark.parametrize("option", ["--bf16", "--memory-efficient-bf16"])
def test_a_checkpoint_with_rounded_parameters_is_reported(option: str, data: Path, tmp_path: Path) -> None:
    """As plain fairseq saves it; where there are no others, nothing is lost."""
    train(data, tmp_path, "convs2s_tiny", option, "--max-update", 3)
    path = tmp_path / "checkpoint_last.pt"
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "model": rounded(saved)}, path)
    train(data, tmp_path, "convs2s_tiny", option, "--max-update", 4)
    reports = [line for line in (tmp_path / "log").read_text().splitlines() if "no float32 parameters" in line]
    assert len(reports) == (option == "--bf16")
    assert all(str(path) in report for report in reports)


def config() -> FairseqConfig:
    cfg = FairseqConfig()
    cfg.common.fp16_scale_window = 4
    cfg.optimizer = Namespace(optimizer="sgd", lr=[0.1], momentum=0.0, weight_decay=0.0)
    return cfg


def test_parameters_in_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs have them; here the vector is on the device None, as all tensors of a CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    sizes = [torch.Size(size) for size in ((2, 3), (4,), ())]
    parameters = [torch.nn.Parameter(torch.randn(size).half()) for size in sizes]
    vector = FP16Optimizer.build_fp32_params(None, parameters, flatten=True)
    optimizer = FP16Optimizer(config(), parameters, None, vector)
    found = precision.masters(optimizer)
    assert [value.shape for value in found.values()] == sizes
    for number, parameter in enumerate(parameters):
        assert torch.equal(found[parameter], parameter.float())
        found[parameter].fill_(number)
    optimizer._sync_fp32_params_to_fp16()
    assert [parameter.unique().tolist() for parameter in parameters] == [[0], [1], [2]]


def test_the_loss_scale_of_amp_is_restored() -> None:
    """fairseq's has one on GPUs only, which is the same class."""
    optimizers = []
    for _ in range(2):
        optimizer = AMPOptimizer.build_optimizer(config(), [torch.nn.Parameter(torch.zeros(2))])
        optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=4, growth_interval=3)
        optimizers.append(optimizer)
    trained, resumed = optimizers
    for _ in range(4):
        trained.backward(trained.optimizer.param_groups[0]["params"][0].sum())
        trained.step()
    saved = precision.scaler_state(trained)
    assert saved == {"scale": 8, "_growth_tracker": 1}
    for bad in (None, [], {}, {"scale": "8"}, {**saved, "_growth_tracker": torch.ones(2)}):
        precision.restore_loss_scale(resumed, bad)
    precision.restore_loss_scale(resumed, {**saved, "growth_factor": 9})
    assert resumed.scaler.state_dict() == trained.scaler.state_dict()


def test_parameters_in_float32_have_no_others() -> None:
    cfg = config()
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    for optimizer in (build_optimizer(cfg.optimizer, parameters), AMPOptimizer.build_optimizer(cfg, parameters)):
        assert precision.masters(optimizer) == precision.scaler_state(optimizer) == {}
