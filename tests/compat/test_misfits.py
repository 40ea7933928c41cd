"""What does not go with a model says so, before anything is trained."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import Dictionary

from fairseq_plugins.compat.misfits import missing_in_the_task
from tests.commands import QUIET, TRAINING, USER_DIR, run
from tests.conftest import ARCHITECTURES


def refused(data: Path, *options: object) -> str:
    command = [data, "--user-dir", USER_DIR, "--no-save", *TRAINING, *QUIET]
    return run("train", *command, "--arch", ARCHITECTURES[0], *options, succeeds=False).stderr.splitlines()[-1]


@pytest.mark.parametrize("task", ["language_modeling", "cross_lingual_lm"])
def test_a_task_without_sources_is_refused(data: Path, task: str) -> None:
    """One with its options in a dataclass, and one in fairseq's old way."""
    assert refused(data, "--task", task) == (
        f"ValueError: --arch {ARCHITECTURES[0]} does not go with --task {task}, which has no max_source_positions: "
        "take --task translation or translation_fast"
    )


def test_tasks_that_have_what_a_model_takes_are_taken(architecture: str) -> None:
    needs = Namespace(arch=architecture, task="translation", max_source_positions="${task.max_source_positions}")
    assert not list(missing_in_the_task(needs))
    old = Namespace(arch=architecture, task="translation_multi_simple_epoch", max_source_positions=9)
    assert list(missing_in_the_task(old)) == ["max_target_positions"]
    assert not list(missing_in_the_task(Namespace(**vars(old), max_target_positions=9)))
    assert not list(missing_in_the_task(Namespace()))


def test_a_multilingual_task_names_what_it_takes(data: Path) -> None:
    error = refused(data, "--task", "multilingual_translation", "--lang-pairs", "src-tgt")
    assert f"takes --arch multilingual_transformer and its like, not {ARCHITECTURES[0]}" in error


def test_adaptive_loss_wants_an_adaptive_softmax(data: Path) -> None:
    error = refused(data, "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp")
    assert error.startswith("ValueError: --criterion adaptive_loss is for a model with an adaptive softmax")


def test_another_assertion_of_adaptive_loss_is_raised_as_it_is(dictionary: Dictionary) -> None:
    """Here of a model that has an adaptive softmax."""

    class Model(torch.nn.Module):
        decoder = SimpleNamespace(adaptive_softmax=torch.nn.Identity())

        def forward(self) -> None:
            raise AssertionError

    with pytest.raises(AssertionError):
        AdaptiveLoss(SimpleNamespace(target_dictionary=dictionary), False)(Model(), {"net_input": {}})


def test_adaptive_loss_goes_with_fairseqs_transformer(data: Path) -> None:
    options = ["--arch", "transformer_tiny", "--adaptive-softmax-cutoff", 8, "--max-update", 1, "--no-save"]
    options += ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", *TRAINING, *QUIET]
    run("train", data, "--user-dir", USER_DIR, *options)


def test_moses_wants_languages(data: Path) -> None:
    options = [data, "--user-dir", USER_DIR, "--path", "none.pt", "--tokenizer", "moses", "--source-lang", "src"]
    error = run("generate", *options, succeeds=False).stderr.splitlines()[-1]
    assert error == "ValueError: --tokenizer moses needs --source-lang and --target-lang"
    error = run("generate", *options, "--target-lang", "tgt", succeeds=False).stderr.splitlines()[-1]
    assert "none.pt" in error


def test_validation_wants_a_task(data: Path) -> None:
    error = run("validate", data, "--user-dir", USER_DIR, "--path", "none.pt", succeeds=False).stderr.splitlines()[-1]
    assert error == "ValueError: --task is wanted, that of the training, such as translation"
