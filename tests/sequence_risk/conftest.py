"""Models of this plugin and of fairseq to train, and a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import utils

from tests.conftest import ARCHITECTURES
from tests.search.fairseq_models import FAIRSEQ_MODELS, fairseq_model
from tests.sequence_risk.risk import batch


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute softmax in double precision; fairseq always uses float32."""
    monkeypatch.setattr(utils, "log_softmax", lambda x, dim, onnx_trace=False: x.log_softmax(dim))


@pytest.fixture(params=[*ARCHITECTURES, *FAIRSEQ_MODELS])
def models(
    request: pytest.FixtureRequest, build: Any, task: SimpleNamespace, device: torch.device, double: None
) -> list[Any]:
    """Return two copies of a model, in float64 and without dropout."""
    if request.param == "lstm":
        request.getfixturevalue("_without_cudnn")
    if request.param in FAIRSEQ_MODELS:
        return [fairseq_model(request.param, task).to(device).double() for _ in range(2)]
    return [build(request.param).double() for _ in range(2)]


@pytest.fixture
def sample(sentences: Any) -> dict[str, Any]:
    return batch(sentences([6, 4, 1]), sentences([5, 4, 3], seed=2))
