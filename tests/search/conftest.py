"""Models to search with, and candidates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_plugins.cpu import winograd
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import ARCHITECTURES
from tests.search.fairseq_models import FAIRSEQ_MODELS, fairseq_model
from tests.search.searching import Model


@pytest.fixture(params=[*ARCHITECTURES, *FAIRSEQ_MODELS])
def model(request: pytest.FixtureRequest, build: Model, task: SimpleNamespace, device: torch.device) -> Model:
    """``model(seed=1)``: the same random model at each call, in double precision, so that searches can be compared.

    Scores are in single precision all the same.
    """
    if request.param in FAIRSEQ_MODELS:
        return lambda seed=1: fairseq_model(request.param, task, seed).to(device).double()
    return lambda seed=1: build(request.param, seed).double()


@pytest.fixture(params=["one by one", "in pairs"])
def steps_of_convolutions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in narrow layers, and as in those of 512: with a kernel of three, two steps in four products."""
    if request.param == "in pairs":
        monkeypatch.setattr(winograd, "NARROWEST", 0)


@pytest.fixture
def everything(dictionary: Dictionary) -> Candidates:
    translations = torch.full((len(dictionary), 1), dictionary.pad())
    return Candidates(translations, torch.ones(len(dictionary), dtype=torch.bool))


@pytest.fixture
def some(dictionary: Dictionary) -> Candidates:
    """Of 44 words the special ones, 8 frequent ones, and one for each source word: some 25 for a batch."""
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: dictionary.nspecial] = True
    generator = torch.Generator().manual_seed(1)
    always[torch.randperm(40, generator=generator)[:8] + 4] = True
    return Candidates(torch.randint(4, 44, (len(dictionary), 1), generator=generator), always)
