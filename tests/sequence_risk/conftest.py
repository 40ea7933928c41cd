"""Models, batches and the criterion `sequence_risk`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.conftest import ARCHITECTURES
from tests.search.searching import FAIRSEQ_MODELS, fairseq_model


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


PAD, EOS = 1, 2


def batch(source: Tensor, target: Tensor) -> dict[str, Any]:
    previous = torch.cat([torch.full_like(target[:, :1], EOS), target[:, :-1]], dim=1)
    previous = previous.masked_fill((previous == EOS) & (torch.arange(target.size(1), device=target.device) > 0), PAD)
    inputs = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(dim=1), "prev_output_tokens": previous}
    count = len(source)
    return {"net_input": inputs, "target": target, "ntokens": int(target.ne(PAD).sum()), "nsentences": count}


def one_by_one(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one batch per sentence, without padding."""
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    return [batch(x[x != PAD].unsqueeze(0), y[y != PAD].unsqueeze(0)) for x, y in zip(source, target, strict=True)]


def translation_task(dictionary: Dictionary, **attributes: Any) -> Any:
    """Return a translation task with the attributes that a criterion reads."""
    task = TranslationTask.__new__(TranslationTask)
    task.__dict__.update(tgt_dict=dictionary, src_dict=dictionary, cfg=SimpleNamespace(), **attributes)
    return task


def criterion(dictionary: Dictionary, candidates: Candidates | None = None, **options: Any) -> SequenceRisk:
    options.setdefault("risk_hypotheses", min(SequenceRiskConfig.risk_hypotheses, len(dictionary) - 1))
    return SequenceRisk(translation_task(dictionary, candidates=candidates), SequenceRiskConfig(**options))
