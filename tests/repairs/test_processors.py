"""Training on a processor: ``--bf16``, and beside a GPU."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from fairseq import options, utils

from fairseq_plugins.repairs import command_line
from tests.commands import MODEL, QUIET, SIZES, TRAINING, USER_DIR, run


def train(data: Path, folder: Path, *precision: object) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and parameters after an epoch of four updates."""
    command = [data, "--user-dir", USER_DIR, "--arch", "convs2s", *MODEL, *SIZES, *TRAINING, *QUIET, "--cpu"]
    command += ["--max-epoch", 1, "--dropout", 0, "--save-dir", folder]
    output = run("train", *command, *precision)
    loss = re.search(r'"valid_loss": "([\d.]+)"', output.stdout + output.stderr)
    assert loss is not None
    return float(loss[1]), torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]


@pytest.mark.parametrize("option", ["--bf16", "--memory-efficient-bf16"])
def test_training_on_a_processor(data: Path, tmp_path: Path, option: str) -> None:
    loss, model = train(data, tmp_path / "half", option)
    exact, _ = train(data, tmp_path / "exact")
    assert loss == pytest.approx(exact, rel=0.01)
    is_rounded = all(torch.equal(each, each.bfloat16().to(each.dtype)) for each in model.values())
    assert is_rounded == (option == "--memory-efficient-bf16")  # else the checkpoint holds the masters


def test_gradients_are_clipped_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no GPU is asked for where a tensor is to be moved to it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.tensor([3.0, 4.0])
    assert float(utils.clip_grad_norm_(iter(parameters), 1.0)) == pytest.approx(50**0.5)
    assert torch.stack([each.grad for each in parameters]).norm() == pytest.approx(1, rel=1e-5)
    assert torch.cuda.is_available()


def test_a_tpu_wants_its_software(data: Path) -> None:
    errors = run("train", data, "--user-dir", USER_DIR, "--arch", "convs2s", "--tpu", succeeds=False).stderr
    assert "ValueError: --tpu needs torch_xla, which is not installed" in errors


def test_a_repaired_fairseq_is_left_alone() -> None:
    assert not command_line.takes_bfloat16_for_a_tpu(options.parse_args_and_arch)
    assert command_line.takes_bfloat16_for_a_tpu(lambda *_: argparse.Namespace(tpu=True))
