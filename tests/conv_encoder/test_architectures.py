"""Every architecture through fairseq's commands: training, resuming, generating, interactive."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from tests.commands import QUIET, USER_DIR, hypotheses, run

TRAINING = ["--optimizer", "adam", "--lr", "0.001", "--clip-norm", "1", "--batch-size", "16"]
ARCHITECTURES = sorted(name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if model == "conv_encoder")


@pytest.mark.parametrize(
    "architecture",
    [name if name.endswith("_tiny") else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_commands(data: Path, tmp_path: Path, architecture: str) -> None:
    options = ["--user-dir", USER_DIR, "--arch", architecture, "--save-dir", tmp_path, *TRAINING, *QUIET]
    run("train", data, *options, "--max-epoch", 1)
    resumed = run("train", data, *options, "--max-epoch", 2)
    assert "Loaded checkpoint" in resumed.stderr + resumed.stdout
    model = ["--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--beam", 3]
    generated = hypotheses(run("generate", data, *model, "--batch-size", 8).stdout)
    assert sorted(generated) == list(range(16))
    source = (data.parent / "test.src").read_text()
    interactive = hypotheses(run("interactive", data, *model, stdin=source).stdout)
    assert interactive == {
        number: [(pytest.approx(score, abs=1e-4), text) for score, text in beams] for number, beams in generated.items()
    }
