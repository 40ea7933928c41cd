"""Names that users type are frozen, so that changes are deliberate."""

from __future__ import annotations

import re
from argparse import ArgumentParser

import pytest
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from fairseq.tasks.translation import TranslationConfig

from fairseq_plugins.cli import main as cli
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


def options(config: type) -> set[str]:
    parser = ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, config())
    return {*parser._option_string_actions}


@pytest.mark.parametrize(
    ("family", "architectures"),
    [
        ("convs2s", "analysis gigaword iwslt_de_en tiny wmt_en_de wmt_en_fr wmt_en_ro"),
        ("conv_encoder", "bilstm iwslt_de_en pooling tiny wmt_en_de wmt_en_fr wmt_en_ro"),
        ("weighted_transformer", "2layer 4layer 8layer iwslt_de_en large small tiny"),
    ],
)
def test_architectures(family: str, architectures: str) -> None:
    names = [family, *(f"{family}_{name}" for name in architectures.split())]
    assert sorted(name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if model == family) == names


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


def test_registered_names() -> None:
    assert LR_SCHEDULER_DATACLASS_REGISTRY["anneal_after_plateau"] is AnnealAfterPlateauConfig
    assert LR_SCHEDULER_DATACLASS_REGISTRY["weighted_inverse_sqrt"] is WeightedInverseSqrtConfig
    assert OPTIMIZER_DATACLASS_REGISTRY["simplex_adam"] is SimplexAdamConfig
    assert CRITERION_DATACLASS_REGISTRY["sequence_risk"] is SequenceRiskConfig
    assert TASK_DATACLASS_REGISTRY["translation_fast"] is TranslationFastConfig
    losses = {"weighted_label_smoothed_cross_entropy", "vocab_selection_cross_entropy"}
    assert losses <= CRITERION_DATACLASS_REGISTRY.keys()


def test_the_page_has_the_defaults_of_sequence_risk() -> None:
    page = (ROOT / "docs" / "whole_sentences.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\|[^|]*\| `--risk-(\w+) (\S+)` \|", page, flags=re.MULTILINE))
    assert told.keys() == {"alpha", "cost", "hypotheses", "scale"}
    for name, value in told.items():
        assert f"{getattr(SequenceRiskConfig, f'risk_{name}')}".removesuffix(".0") == value


def test_tools(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    tools = ["user-dir", "import-fconv", "own-data", "export", "serve", "average", "lexicon", "plot-attention"]
    tools += ["plot-branches", "plot-loss", "score", "tune-length"]
    assert re.findall(r"^    ([a-z-]+)", shown, flags=re.MULTILINE) == tools
