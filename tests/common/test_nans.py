"""After a gradient that is no number fairseq computes the batch again with hooks, and tells where it went wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.nan_detector import NanDetector

from tests.conftest import ARCHITECTURES


@pytest.mark.filterwarnings("ignore:Using non-full backward hooks")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_where_it_went_wrong(build: Any, sentences: Any, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(architecture).train()
    with NanDetector(model):
        logits, _ = model(sentences([5, 3]), None, sentences([4, 4]))
        (logits * torch.nan).sum().backward()
    assert "NaN detected in output of decoder" in caplog.text
