"""Run fairseq's commands in this process with parsed options and real data, as fairseq's own tests do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq_cli import generate as fairseq_generate
from fairseq_cli import train as fairseq_train

from tests.commands import hypotheses

SIZES = {
    "convs2s_tiny": ["--encoder-layers", "[(16, 3)] * 2", "--decoder-layers", "[(16, 3)] * 2"],
    "weighted_transformer_tiny": ["--encoder-layers", 1, "--encoder-ffn-embed-dim", 32],
    "conv_encoder_tiny": ["--encoder-layers", "[(16, 3)] * 2", "--aggregation-layers", "[(16, 3)]"],
}
SIZES["convs2s_tiny"] += ["--decoder-embed-dim", 16, "--decoder-out-embed-dim", 16]
SIZES["conv_encoder_tiny"] += ["--decoder-hidden-size", 16]
SGD = ["--optimizer", "sgd", "--lr", 0.5, "--criterion", "cross_entropy"]
OPTIMIZERS = {
    "convs2s_tiny": SGD,
    "conv_encoder_tiny": SGD,
    "weighted_transformer_tiny": [
        *("--optimizer", "simplex_adam", "--lr-scheduler", "weighted_inverse_sqrt", "--warmup-updates", 4),
        # Some gradients, such as those of key biases, are only rounding errors; Adam would turn them into whole steps.
        *("--adam-eps", 1),
        *("--criterion", "weighted_label_smoothed_cross_entropy", "--label-smoothing", 0.1),
    ],
}


def parse(parser: Any, words: list[object]) -> Any:
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [*map(str, words)]))


@pytest.fixture(scope="session")
def train(data: Path) -> Callable[..., dict[str, Any]]:
    """Return ``train(architecture, save, option, ...)``, which trains, and returns the last checkpoint."""

    def train(architecture: str, save: Path, *more: object) -> dict[str, Any]:
        metrics.reset()  # statistics would otherwise accumulate over the trainings of a process
        words = [
            data,
            "--arch",
            architecture,
            "--encoder-embed-dim",
            16,
            *SIZES[architecture],
            *OPTIMIZERS[architecture],
        ]
        words += ["--save-dir", save, "--dropout", 0, "--max-epoch", 1, "--num-workers", 0, "--no-progress-bar", *more]
        if architecture == "weighted_transformer_tiny":
            words += ["--attention-dropout", 0]
        fairseq_train.main(parse(options.get_training_parser(), words))
        return checkpoint_utils.load_checkpoint_to_cpu(str(save / "checkpoint_last.pt"))

    return train


@pytest.fixture(scope="session")
def translate(data: Path) -> Callable[..., dict[int, list[str]]]:
    """Return ``translate(save, option, ...)``, which translates the test set with the last checkpoint."""

    def translate(save: Path, *more: object) -> dict[int, list[str]]:
        output = save / "output"
        words = [data, "--path", save / "checkpoint_last.pt", "--batch-size", 8, "--num-workers", 0]
        words += ["--results-path", output]
        fairseq_generate.main(
            parse(options.get_generation_parser(), [*words, "--max-len-b", 15, "--no-progress-bar", *more])
        )
        found = hypotheses((output / "generate-test.txt").read_text())
        return {number: [text for _, text in beams] for number, beams in found.items()}

    return translate


def assert_same_parameters(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert one["model"].keys() == other["model"].keys()
    for name, value in one["model"].items():
        torch.testing.assert_close(
            other["model"][name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
