"""Invalid options of models, optimizers, schedules and criterions are refused by name, and unused ones are named."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import OptimizationConfig
from omegaconf import OmegaConf

from fairseq_plugins.common.anneal_after_plateau import AnnealAfterPlateau, AnnealAfterPlateauConfig
from fairseq_plugins.common.options import FRACTION, POSITIVE, Range, input_widths, parse_attention, parse_convolutions
from fairseq_plugins.conv_encoder.config import ConvEncoderConfig
from fairseq_plugins.convs2s.config import ConvS2SConfig
from fairseq_plugins.search.task import TranslationFastConfig, TranslationFastTask
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.weighted_transformer.config import (
    SimplexAdamConfig,
    WeightedInverseSqrtConfig,
    WeightedTransformerConfig,
)
from fairseq_plugins.weighted_transformer.training import FairseqSimplexAdam, WeightedInverseSqrt
from tests.conftest import random_model
from tests.sequence_risk.conftest import translation_task


@pytest.mark.parametrize(
    "text",
    ["", "[]", "512", "[512, 3]", "[(512, 3, 1, 1)]", "[(0, 3)]", "[(512, True)]", "[('512', 3)]", "[(512, 3)",
     "[(512, 3)] * 201", "[(512, 3) for _ in range(2)]", "[(len('ab'), 3)]", "[(8, 3), (8, 3, 3)]"],
)  # fmt: skip
def test_refused_layers(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--encoder-layers: "):
        parse_convolutions(text, "--encoder-layers")


def test_accepted_layers() -> None:
    """There are at most 200 layers, and a residual connection begins at most at the input."""
    assert len(parse_convolutions("[(512, 3)] * 200", "--encoder-layers")) == 200
    parse_convolutions("[(8, 3), (8, 3, 2)]", "--encoder-layers")


def test_input_widths_of_layers_and_residual_connections() -> None:
    layers = parse_convolutions("[(8, 3), (16, 3, 2), (24, 3, 0), (32, 3, 3)]", "--encoder-layers")
    assert input_widths(layers) == [(8, 8), (8, 8), (16, 16), (24, 8)]
    assert input_widths([]) == []


def test_attention_in_any_subset_of_the_layers() -> None:
    assert parse_attention("True", 3) == [True] * 3
    assert parse_attention("[True, False] + [False]", 3) == [True, False, False]


@pytest.mark.parametrize("text", ["False", "[False] * 3", "[True]", "[1, 0, 1]", "yes", "[True, None, True]"])
def test_refuses_attention_that_does_not_fit(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--decoder-attention: "):
        parse_attention(text, 3)


def options(config: type, values: dict[str, Any]) -> Any:
    """Return a configuration whose references to other groups are resolved."""
    plain = {"lr": [0.25], "tpu": False, "maximize_best_checkpoint_metric": False}
    plain |= {"encoder_embed_dim": 16, "encoder_layers": "2"}
    names = {each.name for each in fields(config)}
    return OmegaConf.merge(vars(config()), {**{n: v for n, v in plain.items() if n in names}, **values})


def model(architecture: str) -> Callable[..., Any]:
    return lambda dictionary, values: random_model(
        architecture, SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary), **values
    )


def optimizer(**values: Any) -> FairseqSimplexAdam:
    return FairseqSimplexAdam(options(SimplexAdamConfig, values), [torch.ones(1)])


MADE: dict[type, Callable[..., Any]] = {
    ConvS2SConfig: model("convs2s_tiny"),
    ConvEncoderConfig: model("conv_encoder_tiny"),
    WeightedTransformerConfig: model("weighted_transformer_tiny"),
    SimplexAdamConfig: lambda _, values: optimizer(**values),
    WeightedInverseSqrtConfig: lambda _, values: WeightedInverseSqrt(
        options(WeightedInverseSqrtConfig, values), optimizer()
    ),
    AnnealAfterPlateauConfig: lambda _, values: AnnealAfterPlateau(
        options(AnnealAfterPlateauConfig, values), optimizer()
    ),
    SequenceRiskConfig: lambda dictionary, values: SequenceRisk(
        translation_task(dictionary), SequenceRiskConfig(**values)
    ),
}
NUMBERS = [
    (config, each.name, value)
    for config in MADE
    for each in fields(config)
    if each.name != "lr" and ("int" in str(each.type) or "float" in str(each.type))
    for value in (-1, *(() if "int" in str(each.type) else (math.nan, math.inf)))
]


@pytest.mark.parametrize(("config", "name", "value"), NUMBERS)
def test_numbers(config: type, name: str, value: float, dictionary: Any) -> None:
    """For every numeric option, the error names the option and the value."""
    with pytest.raises(ValueError, match=rf"^--{name.replace('_', '-')} .*{value}"):
        MADE[config](dictionary, {name: value})


WRONG = [
    (ConvS2SConfig, {"encoder_layers": "[(16, 3)] * __import__('os').getpid()"}, "--encoder-layers"),
    (ConvS2SConfig, {"decoder_attention": "[True]"}, "--decoder-attention"),
    (ConvS2SConfig, {"decoder_out_embed_dim": 0}, "--decoder-out-embed-dim"),
    (ConvS2SConfig, {"decoder_embed_dim": 8}, "--encoder-embed-dim and --decoder-embed-dim"),
    (ConvS2SConfig, {"share_input_output_embed": True, "decoder_out_embed_dim": 8}, "--share-input-output-embed"),
    (ConvS2SConfig, {"encoder_embed_path": "nowhere.txt"}, "--encoder-embed-path nowhere.txt"),
    (ConvS2SConfig, {"dropout": 1.5}, "--dropout"),
    (ConvEncoderConfig, {"pooling_width": 4, "encoder_type": "pooling"}, "--pooling-width"),
    (ConvEncoderConfig, {"encoder_layers": "[]"}, "--encoder-layers"),
    (ConvEncoderConfig, {"aggregation_layers": "[(256, 0)]"}, "--aggregation-layers"),
    (ConvEncoderConfig, {"decoder_layers": 10**6}, "--decoder-layers"),
    (ConvEncoderConfig, {"encoder_lstm_layers": 0}, "--encoder-lstm-layers"),
    (WeightedTransformerConfig, {"encoder_attention_heads": 3}, "--encoder-attention-heads"),
    (WeightedTransformerConfig, {"decoder_ffn_embed_dim": 30}, "--decoder-attention-heads"),
    (WeightedTransformerConfig, {"branch_gating_topk": 5}, "--branch-gating-topk"),
    (WeightedTransformerConfig, {"encoder_layers": 10**6}, "--encoder-layers"),
    (WeightedTransformerConfig, {"encoder_embed_dim": 15}, "--encoder-embed-dim"),
    (WeightedTransformerConfig, {"encoder_ffn_embed_dim": 0}, "--encoder-ffn-embed-dim"),
    (WeightedInverseSqrtConfig, {"branch_warmup_updates": 0}, "--branch-warmup-updates"),
    (AnnealAfterPlateauConfig, {"lr_shrink": 10.0}, "--lr-shrink"),
    (SequenceRiskConfig, {"risk_hypotheses": 1}, "--risk-hypotheses"),
    (SequenceRiskConfig, {"risk_hypotheses": 44}, "--risk-hypotheses"),  # fairseq's search never predicts padding
    *((SimplexAdamConfig, {"adam_betas": betas}, "--adam-betas") for betas in ("(2, 3)", "(0.9,)", "('a', 0.9)", "1")),
]


@pytest.mark.parametrize(("config", "values", "name"), WRONG, ids=lambda value: str(value).replace("/", ""))
def test_wrong_options(config: type, values: dict[str, Any], name: str, dictionary: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        MADE[config](dictionary, values)


@pytest.mark.parametrize("config", MADE)
def test_the_defaults_are_allowed(config: type, dictionary: Any) -> None:
    MADE[config](dictionary, {})


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (FRACTION, [0, 0.5, 1], [-0.1, 1.1, math.nan, "1", None]),
        (POSITIVE, [1e-9, 10**400], [0, math.inf]),
        (Range(1, 3), [1, 3], [0, 4]),
    ],
)
def test_ends_of_ranges(allowed: Range, inside: list[Any], outside: list[Any]) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)


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
    ("given", "expected"),
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
def test_options_of_another_encoder(build, caplog, given: dict[str, Any], expected: list[str]) -> None:
    build("conv_encoder_tiny", **given)
    assert told(caplog) == expected
