"""Hypotheses from beam search and sampling."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.search import Sampling

from fairseq_plugins.cpu.packing import PRECISIONS
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.sequence_risk.hypotheses import _Sampling
from tests.operators import Operators
from tests.sequence_risk.conftest import EOS, criterion, translation_task

LONGEST = [{9 + 5 + 1}, {6 + 5 + 1}, {1 + 5 + 1}]  # lengths including the end, for sources of 6, 4 and 1 words


def test_a_forced_end_whose_probability_underflows(build: Any, sample: Any, dictionary: Dictionary) -> None:
    model = build("convs2s_tiny")
    model.decoder.output_projection.bias.data[EOS] = -1e4
    translations = criterion(dictionary, risk_sampling=True).generator.generate(model.train(), sample)
    assert [{len(each) for each in found} for found in translations] == LONGEST


def test_a_forced_end_counts_with_its_probability(dictionary: Dictionary) -> None:
    """Scores equal those of fairseq's sampling where fairseq's does not fail."""
    lprobs = torch.full((2, 3, len(dictionary)), -torch.inf)
    lprobs[:, :, EOS] = torch.tensor([-0.5, -79.0, -85.0])
    scores = torch.randn(2, 3, 4)
    wanted, found = (made(dictionary).step(3, lprobs.clone(), scores) for made in (Sampling, _Sampling))
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


def test_the_former_name_of_the_option(dictionary: Dictionary) -> None:
    """Old command lines, configuration files and checkpoints contain the former name."""
    assert criterion(dictionary, risk_candidates=3).generator.count == 3
    parser = ArgumentParser()
    gen_parser_from_dataclass(parser, SequenceRiskConfig())
    assert parser.parse_args(["--risk-candidates", "3"]).risk_candidates == 3


def test_validation_does_not_sample(build: Any, sample: Any, dictionary: Dictionary) -> None:
    """Random numbers of a validation would influence the choice of the best checkpoint."""
    model = build("convs2s_tiny").eval()
    beam, drawn = (criterion(dictionary, risk_sampling=draws).generator for draws in (False, True))
    assert drawn.generate(model, sample) == beam.generate(model, sample)
    assert drawn.generate(model.train(), sample) != beam.generate(model, sample)


@pytest.mark.parametrize("plain", [True, False])
def test_longest_translations(build, sample, dictionary, monkeypatch, plain) -> None:
    """If a model never predicts the end, both searches stop after 1.5 times the source length plus five words."""
    monkeypatch.setattr(FastBeamSearch, "_is_plain_beam_search", lambda self: plain)
    model = build("convs2s_tiny")
    model.decoder.output_projection.bias.data[EOS] = -1e4
    found = criterion(dictionary).generator.generate(model, sample)
    assert [{len(each) for each in hypotheses} for hypotheses in found] == LONGEST


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_search_has_the_precision_of_the_task(build, sample, dictionary, device, precision) -> None:
    if device.type != "cpu" or not PRECISIONS[precision][1]():
        pytest.skip(f"no {precision} here")
    task = translation_task(dictionary)
    task.cfg.cpu_dtype = precision
    with Operators() as operators:
        SequenceRisk(task, SequenceRiskConfig()).generator.generate(build("convs2s_tiny"), sample)
    assert bool(operators.count("quantized.linear_dynamic")) == (precision == "int8")
