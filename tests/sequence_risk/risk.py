"""Batches and the criterion `sequence_risk`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.vocabulary.candidates import Candidates

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
