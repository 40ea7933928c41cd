"""Options that do nothing beside others: each is told, once, and those that do something are not."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_plugins.search.config import TranslationFastConfig
from fairseq_plugins.search.task import TranslationFastTask
from tests.commands import QUIET, USER_DIR, run

TRAINING = ["--arch", "weighted_transformer_tiny", "--optimizer", "simplex_adam", "--batch-size", 16, "--max-epoch", 1]
TRAINING += ["--lr-scheduler", "weighted_inverse_sqrt", *QUIET]


def told(output: str) -> list[str]:
    return re.findall(r"--[a-z-]+ does nothing [a-z -]*", output)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint, and what training it printed."""
    folder = tmp_path_factory.mktemp("nothing")
    result = run("train", data, "--user-dir", USER_DIR, *TRAINING, "--lr", 0.1, "--save-dir", folder)
    return folder / "checkpoint_last.pt", result.stdout + result.stderr


def test_a_schedule_with_rates_of_its_own(data: Path, trained: tuple[Path, str]) -> None:
    assert told(trained[1]) == ["--lr does nothing with --lr-scheduler weighted"]
    assert "take --lr-scale" in trained[1]
    again = run("train", data, "--user-dir", USER_DIR, *TRAINING, "--lr-scale", 2, "--max-update", 1, "--no-save")
    assert not told(again.stdout + again.stderr)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--score-reference", "--cpu-dtype", "bfloat16", "--word-penalty", 1], ["--cpu-dtype", "--word-penalty"]),
        (["--attention-offset", 1], ["--attention-offset"]),
        (["--candidates-per-word", 3, "--frequent-candidates", 5], ["--candidates-per-word", "--frequent-candidates"]),
        (["--score-reference"], []),
        (["--word-penalty", 1, "--candidates-per-word", 20], []),
    ],
)
def test_options_of_a_search(data: Path, trained: tuple[Path, str], options: list[object], expected) -> None:
    command = ["--path", trained[0], "--task", "translation_fast", "--max-len-b", 4, "--batch-size", 16]
    result = run("generate", data, "--user-dir", USER_DIR, *command, *options)
    assert [line.split()[0] for line in told(result.stdout + result.stderr)] == expected


@pytest.mark.parametrize(
    ("encoder_type", "options", "expected"),
    [
        ("pooling", ["--no-residual", "--pooling-width", 3, "--single-stack"], ["--no-residual", "--single-stack"]),
        ("bilstm", ["--pooling-width", 3, "--encoder-hidden-size", 7], ["--pooling-width"]),
        ("convolutional", ["--no-residual", "--single-stack", "--encoder-hidden-size", 7], []),
        ("pooling", [], []),
    ],
)
def test_options_of_another_encoder(data: Path, encoder_type: str, options: list[object], expected) -> None:
    command = ["--arch", "conv_encoder_tiny", "--encoder-type", encoder_type, "--optimizer", "adam", "--lr", 1e-3]
    command += ["--batch-size", 16, "--max-update", 1, "--no-save", *QUIET]
    result = run("train", data, "--user-dir", USER_DIR, *command, *options)
    found = told(result.stdout + result.stderr)
    assert found == [f"{option} does nothing with --encoder-type {encoder_type}" for option in expected]


def test_it_is_told_once_and_only_where_it_is_so(build, dictionary, caplog: pytest.LogCaptureFixture) -> None:
    task = TranslationFastTask(TranslationFastConfig(attention_offset=1, cpu_dtype="bfloat16"), dictionary, dictionary)
    models = [build("convs2s_tiny")]
    task.build_generator(models, Namespace(replace_unk=""))
    assert not told(caplog.text)
    for _ in range(2):
        task.build_generator(models, SimpleNamespace())
    assert told(caplog.text) == ["--attention-offset does nothing without --replace-unk"]
