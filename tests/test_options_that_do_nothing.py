"""Options that do nothing with others are named once, and options with an effect are accepted."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest
from fairseq.dataclass.configs import OptimizationConfig

from fairseq_plugins.search.task import TranslationFastConfig, TranslationFastTask
from fairseq_plugins.weighted_transformer.config import SimplexAdamConfig, WeightedInverseSqrtConfig
from fairseq_plugins.weighted_transformer.training import WeightedInverseSqrt
from tests.test_options import optimizer, options


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return re.findall(r"(--[a-z-]+) (?:does nothing|has no effect)", caplog.text)


@pytest.mark.parametrize(("lr", "expected"), [([0.1], ["--lr"]), (OptimizationConfig().lr, [])])
def test_a_schedule_with_rates_of_its_own(lr: list[float], expected: list[str], caplog) -> None:
    made = optimizer()
    made.cfg = options(SimplexAdamConfig, {"lr": lr})
    WeightedInverseSqrt(options(WeightedInverseSqrtConfig, {}), made)
    assert told(caplog) == expected


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"cpu_dtype": "bfloat16", "word_penalty": 1}, {"score_reference": True}, ["--cpu-dtype", "--word-penalty"]),
        ({"attention_offset": 1}, {}, ["--attention-offset"]),
        ({"attention_offset": 1}, {"replace_unk": ""}, []),
        ({"candidates_per_word": 3, "frequent_candidates": 5}, {}, ["--candidates-per-word", "--frequent-candidates"]),
        ({"word_penalty": 1}, {}, []),
    ],
)
def test_options_of_a_search(build, dictionary, caplog, config: dict, given: dict, expected: list[str]) -> None:
    made = TranslationFastTask(TranslationFastConfig(**config), dictionary, dictionary)
    for _ in range(2):  # the Python interface builds a generator for each call
        made.build_generator([build("convs2s_tiny")], Namespace(**given))
    assert told(caplog) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"encoder_type": "pooling", "no_residual": True, "pooling_width": 3, "single_stack": True},
            ["--no-residual", "--single-stack"],
        ),
        ({"encoder_type": "bilstm", "pooling_width": 3, "encoder_hidden_size": 7}, ["--pooling-width"]),
        ({"no_residual": True, "single_stack": True, "encoder_hidden_size": 7}, []),
        ({"encoder_type": "pooling"}, []),
    ],
)
def test_options_of_another_encoder(build, caplog, options: dict[str, Any], expected: list[str]) -> None:
    build("conv_encoder_tiny", **options)
    assert told(caplog) == expected
