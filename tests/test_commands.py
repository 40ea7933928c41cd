"""The real commands in turn: preprocess, train, generate and interactive; and the recipes of hydra-train."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, build_model
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from omegaconf import OmegaConf, open_dict

from tests.commands import ROOT, USER_DIR, run, train

# Validation by BLEU translates during training; the learning-rate schedule is the plugin's.
BLEU = ["--eval-bleu", "--eval-bleu-args", '{"beam": 3}', "--eval-bleu-remove-bpe", "--eval-bleu-detok", "space"]
BLEU += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
BLEU += ["--lr-scheduler", "anneal_after_plateau"]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(data, folder, *BLEU, "--dropout", 0, "--batch-size", 64, "--max-epoch", 4)
    return folder


def test_bleu_during_training_is_that_of_the_checkpoint(data: Path, trained: Path) -> None:
    """Translation during training uses the current weights."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(trained / "checkpoint_last.pt"))
    options = ["--user-dir", USER_DIR, "--path", trained / "checkpoint_last.pt", "--gen-subset", "valid", "--beam", 3]
    result = run("generate", data, *options, "--scoring", "sacrebleu")
    bleu = float(re.search(r"BLEU[^=]*= ([\d.]+)", result.stdout)[1])
    assert state["extra_state"]["val_loss"] == pytest.approx(bleu, abs=0.06)


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda recipe: recipe.stem)
def test_recipes_build_their_architecture(recipe: Path, task) -> None:
    """hydra merges defaults of a configuration before it reads the architecture, which must override these defaults."""
    cfg = OmegaConf.load(recipe)
    architecture = cfg.model._name
    options = {name: value for name, value in cfg.model.items() if name != "_name"}
    wanted = Namespace(arch=architecture, max_source_positions=8, max_target_positions=8, **options)
    ARCH_CONFIG_REGISTRY[architecture](wanted)
    with open_dict(cfg):
        cfg.task.update({"data": "", "max_source_positions": 8, "max_target_positions": 8})
    add_defaults(cfg)
    with torch.device("meta"):
        expected = ARCH_MODEL_REGISTRY[architecture].build_model(wanted, task)
        model = build_model(cfg.model, task)
    sizes = [{name: value.shape for name, value in each.state_dict().items()} for each in (model, expected)]
    assert sizes[0] == sizes[1]
    assert cfg.optimizer._name in OPTIMIZER_DATACLASS_REGISTRY, "others cannot be configured with hydra"


def test_forked_commands_equal_commands_that_users_start(data: Path, trained: Path) -> None:
    """Forked commands print the same as other commands, except for fairseq's import logs, and numbers such as times."""
    words = [data, "--user-dir", USER_DIR, "--task", "translation", "--path", trained / "checkpoint_last.pt"]
    forked, started = (run("interactive", *words, stdin="w1 w2\n\nw3", fork=fork) for fork in (True, False))
    assert masked(forked.stdout) == masked(started.stdout)
    assert masked(forked.stderr) == masked(started.stderr)


def masked(log: str) -> list[str]:
    """Return the output's lines without numbers that differ between two runs."""
    return [re.sub(r"[\d.,]+", "N", line) for line in log.splitlines() if "tensorboardX" not in line]
