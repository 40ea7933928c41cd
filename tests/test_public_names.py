"""Names of options and architectures are frozen, so that changes are deliberate."""

from __future__ import annotations

import re
from argparse import ArgumentParser

import pytest
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.tasks.translation import TranslationConfig

from fairseq_plugins.common.anneal_after_plateau import AnnealAfterPlateauConfig
from fairseq_plugins.conv_encoder.config import ConvEncoderConfig
from fairseq_plugins.convs2s.config import ConvS2SConfig
from fairseq_plugins.search.task import TranslationFastConfig
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.weighted_transformer.config import (
    SimplexAdamConfig,
    WeightedInverseSqrtConfig,
    WeightedTransformerConfig,
)
from tests.commands import ROOT
from tests.common.test_presets import build

FAMILIES = ("convs2s", "weighted_transformer", "conv_encoder")


def options(config: type) -> set[str]:
    parser = ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, config())
    assert all(action.help for action in parser._actions), "every option explains itself"
    return {*parser._option_string_actions}


OPTIONS = {
    ConvS2SConfig: """decoder-attention decoder-embed-dim decoder-embed-path decoder-layers decoder-out-embed-dim
        dropout encoder-embed-dim encoder-embed-path encoder-layers no-decoder-positional-embeddings
        no-encoder-positional-embeddings share-input-output-embed""",
    WeightedTransformerConfig: """attention-dropout branch-constraint branch-gating-topk branch-weights
        decoder-attention-heads decoder-ffn-embed-dim decoder-layers decoder-learned-pos dropout
        encoder-attention-heads encoder-embed-dim encoder-ffn-embed-dim encoder-layers encoder-learned-pos
        relu-dropout share-embeddings""",
    ConvEncoderConfig: """aggregation-layers decoder-hidden-size decoder-layers dropout encoder-embed-dim
        encoder-hidden-size encoder-layers encoder-lstm-layers encoder-lstm-positional-embeddings encoder-type
        init-range no-encoder-positional-embeddings no-residual pooling-width single-stack""",
    AnnealAfterPlateauConfig: "lr-shrink",
    WeightedInverseSqrtConfig: "branch-lr-scale branch-warmup-updates lr-scale warmup-updates",
    SimplexAdamConfig: "freeze-branch-weights-after",
    SequenceRiskConfig: """label-smoothing risk-alpha risk-candidates risk-cost risk-hypotheses risk-reference
        risk-sampling risk-scale""",
    TranslationFastConfig: """attention-offset candidates candidates-per-word compile-steps cpu-dtype
        frequent-candidates word-penalty""",
}
INHERITED = {SimplexAdamConfig: FairseqAdamConfig, TranslationFastConfig: TranslationConfig}


@pytest.mark.parametrize("config", OPTIONS)
def test_options(config: type) -> None:
    inherited = options(INHERITED[config]) if config in INHERITED else set()
    assert options(config) - inherited == {f"--{name}" for name in OPTIONS[config].split()}


def test_numbers_of_parameters() -> None:
    """The pages of the families give the numbers of parameters of all architectures, in millions."""
    tables = "".join((ROOT / "docs" / f"{family}.md").read_text(encoding="utf-8") for family in FAMILIES)
    found = {name: int(millions) for name, millions in re.findall(r"^\| `(\w+)`.* \| (\d+) M \|", tables, re.MULTILINE)}
    assert set(found) == {name for name in ARCH_MODEL_REGISTRY if name.startswith(FAMILIES)} - set(FAMILIES)
    for name, millions in found.items():
        count = sum(parameter.numel() for parameter in build(name, 10_000).parameters())
        assert round(count / 1e6) == millions, name


def test_the_page_has_the_defaults_of_sequence_risk() -> None:
    page = (ROOT / "docs" / "whole_sentences.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\|[^|]*\| `--risk-(\w+) (\S+)` \|", page, flags=re.MULTILINE))
    assert told.keys() == {"alpha", "cost", "hypotheses", "scale"}
    for name, value in told.items():
        assert f"{getattr(SequenceRiskConfig, f'risk_{name}')}".removesuffix(".0") == value
