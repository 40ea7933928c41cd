"""The translations that the risk is expected over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.search import Sampling

from fairseq_plugins.cpu.products import PRECISIONS
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.sequence_risk.translations import _Sampling
from tests.operators import Operators
from tests.sequence_risk.risk import EOS, criterion, translation_task

LONGEST = [{9 + 5 + 1}, {6 + 5 + 1}, {1 + 5 + 1}]  # of sources of 6, 4 and 1 words, with the end


def test_a_forced_end_that_is_too_unlikely_for_a_number(build: Any, sample: Any, dictionary: Dictionary) -> None:
    model = build("convs2s_tiny")
    model.decoder.output_projection.bias.data[EOS] = -1e4
    translations = criterion(dictionary, risk_sampling=True).translator.translate(model.train(), sample)
    assert [{len(each) for each in found} for found in translations] == LONGEST


def test_a_forced_end_counts_with_its_probability(dictionary: Dictionary) -> None:
    """As with fairseq's sampling, where that does not fail."""
    lprobs = torch.full((2, 3, len(dictionary)), -torch.inf)
    lprobs[:, :, EOS] = torch.tensor([-0.5, -79.0, -85.0])
    scores = torch.randn(2, 3, 4)
    wanted, found = (made(dictionary).step(3, lprobs.clone(), scores) for made in (Sampling, _Sampling))
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


def test_validation_draws_nothing(build: Any, sample: Any, dictionary: Dictionary) -> None:
    """Else luck would say which checkpoint is the best."""
    model = build("convs2s_tiny").eval()
    beam, drawn = (criterion(dictionary, risk_sampling=draws).translator for draws in (False, True))
    assert drawn.translate(model, sample) == beam.translate(model, sample)
    assert drawn.translate(model.train(), sample) != beam.translate(model, sample)


@pytest.mark.parametrize("plain", [True, False])
def test_longest_translations(build, sample, dictionary, monkeypatch, plain) -> None:
    """1.5 times each source and five words, of a model that ends none by itself; also in fairseq's own search."""
    monkeypatch.setattr(FastBeamSearch, "_is_plain", lambda self: plain)
    model = build("convs2s_tiny")
    model.decoder.output_projection.bias.data[EOS] = -1e4
    found = criterion(dictionary).translator.translate(model, sample)
    assert [{len(each) for each in hypotheses} for hypotheses in found] == LONGEST


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_search_has_the_precision_of_the_task(build, sample, dictionary, device, precision) -> None:
    if device.type != "cpu" or not PRECISIONS[precision][1]():
        pytest.skip(f"no {precision} here")
    task = translation_task(dictionary)
    task.cfg.cpu_dtype = precision
    with Operators() as operators:
        SequenceRisk(task, SequenceRiskConfig()).translator.translate(build("convs2s_tiny"), sample)
    assert bool(operators.count("quantized.linear_dynamic")) == (precision == "int8")
