"""Models and candidates for tests of searches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_plugins.cpu import convolution
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import ARCHITECTURES
from tests.search.searching import FAIRSEQ_MODELS, Model, fairseq_model


@pytest.fixture(params=[*ARCHITECTURES, *FAIRSEQ_MODELS])
def model(request: pytest.FixtureRequest, build: Model, task: SimpleNamespace, device: torch.device) -> Model:
    """Return a function that builds the same random model at each call, in double precision; scores are in single."""
    if request.param in FAIRSEQ_MODELS:
        return lambda seed=1: fairseq_model(request.param, task, seed).to(device).double()
    return lambda seed=1: build(request.param, seed).double()


@pytest.fixture(params=["one by one", "in pairs"])
def steps_of_convolutions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute some steps of convolutions as in narrow layers, and some in pairs as in layers of width 512."""
    if request.param == "in pairs":
        monkeypatch.setattr(convolution, "NARROWEST", 0)


@pytest.fixture
def some(dictionary: Dictionary) -> Candidates:
    """Return candidates: special symbols, 8 frequent words, and one per source word, about 25 of 44 words per batch."""
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: dictionary.nspecial] = True
    generator = torch.Generator().manual_seed(1)
    always[torch.randperm(40, generator=generator)[:8] + 4] = True
    return Candidates(torch.randint(4, 44, (len(dictionary), 1), generator=generator), always)
