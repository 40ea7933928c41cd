"""Label-smoothed cross-entropy that shows how the weights of the branches develop."""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.nn.simplex import SimplexVector

__all__ = ["WeightedLabelSmoothedCrossEntropy"]


@register_criterion("weighted_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class WeightedLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's loss, and with it entropy and max/min ratio of κ and α, averaged over the layers.

    Entropy is in bits: log2 M where the branches weigh the same, zero where one has all.  A branch of weight zero would
    make the ratio infinite; it counts as a thousandth of the largest.
    """

    def forward(self, model: BaseFairseqModel, sample: dict[str, Any], reduce: bool = True) -> Any:
        """As fairseq's; the statistics stay on the device."""
        loss, sample_size, logging_output = super().forward(model, sample, reduce)
        if model.training:
            logging_output.update(branch_statistics(model), forwards=1)
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss and, during training, the statistics."""
        super().reduce_metrics(logging_outputs)
        if not any("forwards" in log for log in logging_outputs):
            return
        forwards = sum(log["forwards"] for log in logging_outputs)
        for name in (name for name in logging_outputs[0] if name.startswith(("kappa", "alpha"))):
            metrics.log_scalar(name, sum(log[name] for log in logging_outputs) / forwards, round=3)


@torch.no_grad()
def branch_statistics(model: torch.nn.Module) -> dict[str, Tensor]:
    """Entropy and ratio of κ and α, for each the mean over the layers; scalars on the model's device."""
    vectors: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SimplexVector):
            vectors.setdefault(name.rpartition(".")[2], []).append(module.point().float())
    statistics = {}
    for name, points in vectors.items():
        # Encoder and decoder may have different numbers of branches: what is filled in changes neither figure.
        filled = pad_sequence(points, batch_first=True, padding_value=math.nan)
        largest, smallest = filled.nan_to_num(-math.inf).amax(1), filled.nan_to_num(math.inf).amin(1)
        statistics[f"{name}_entropy"] = torch.special.entr(filled.nan_to_num(0)).sum(1).mean() / math.log(2)
        statistics[f"{name}_ratio"] = (largest / smallest).clamp(max=1000).mean()
    return statistics
