"""The names that users type: a change of one must be meant."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY

from fairseq_plugins.models.convs2s.config import ConvS2SConfig
from fairseq_plugins.optim.config import AnnealAfterPlateauConfig
from fairseq_plugins.tools import cli


def options(config: type) -> list[str]:
    parser = ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, config())
    actions = parser._actions
    assert all(action.help for action in actions), "every option explains itself"
    return sorted(action.option_strings[0] for action in actions)


def test_architectures() -> None:
    assert sorted(name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if model == "convs2s") == [
        "convs2s",
        "convs2s_analysis",
        "convs2s_gigaword",
        "convs2s_iwslt_de_en",
        "convs2s_tiny",
        "convs2s_wmt_en_de",
        "convs2s_wmt_en_fr",
        "convs2s_wmt_en_ro",
    ]


def test_convs2s_options() -> None:
    assert options(ConvS2SConfig) == [
        "--decoder-attention",
        "--decoder-embed-dim",
        "--decoder-embed-path",
        "--decoder-layers",
        "--decoder-out-embed-dim",
        "--dropout",
        "--encoder-embed-dim",
        "--encoder-embed-path",
        "--encoder-layers",
        "--no-decoder-positional-embeddings",
        "--no-encoder-positional-embeddings",
        "--share-input-output-embed",
    ]


def test_schedule_options() -> None:
    assert LR_SCHEDULER_DATACLASS_REGISTRY["anneal_after_plateau"] is AnnealAfterPlateauConfig
    assert options(AnnealAfterPlateauConfig) == ["--lr-shrink"]


def test_tools(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert [name for name in ("user-dir", "import-fconv", "plot-attention") if f"\n    {name}" not in shown] == []
