"""The statistics of κ and α that training logs."""

from __future__ import annotations

import pytest
import torch
from fairseq.logging import metrics
from torch import nn

from fairseq_plugins.weighted_transformer.branches import SimplexVector
from fairseq_plugins.weighted_transformer.training import WeightedLabelSmoothedCrossEntropy, branch_statistics

LOSSES = {"loss": torch.tensor(8.0), "nll_loss": torch.tensor(6.0), "ntokens": 4, "nsentences": 1, "sample_size": 4}


def block(kappa: list[float], alpha: list[float]) -> nn.Module:
    made = nn.ModuleDict()
    for name, point in (("kappa", kappa), ("alpha", alpha)):
        made[name] = SimplexVector(len(point), "learned", "simplex")
        made[name].weight.data.copy_(torch.tensor(point))
    return made


def test_statistics() -> None:
    """Blocks have four or two branches, uniform or one-hot κ; entropies are in bits, and 1000 stands for infinity."""
    model = nn.ModuleList([block([0.25] * 4, [0.4, 0.2, 0.2, 0.2]), block([1.0, 0.0], [0.5, 0.5])])
    found = {name: float(value) for name, value in branch_statistics(model).items()}
    assert found["kappa_entropy"] == pytest.approx((2 + 0) / 2)
    assert found["kappa_ratio"] == pytest.approx((1 + 1000) / 2)
    assert found["alpha_entropy"] == pytest.approx((1.921928 + 1) / 2)
    assert found["alpha_ratio"] == pytest.approx((2 + 1) / 2)


def logs() -> list[dict[str, object]]:
    first = {"kappa_entropy": torch.tensor(1.0), "alpha_ratio": torch.tensor(2.0), "forwards": 1}
    second = {"kappa_entropy": torch.tensor(4.0), "alpha_ratio": torch.tensor(8.0), "forwards": 2}  # two ranks
    return [{**LOSSES, **first}, {**LOSSES, **second}]


def test_statistics_are_of_training(build, sentences, task) -> None:
    """Validation logs no statistics, because weights do not change between its forward passes."""
    source = sentences([5, 3])
    sample = {"net_input": {"src_tokens": source, "src_lengths": None, "prev_output_tokens": source}}
    sample |= {"target": source, "ntokens": 8}
    model = build("weighted_transformer_tiny")
    criterion = WeightedLabelSmoothedCrossEntropy(task, sentence_avg=False, label_smoothing=0.1)
    seen = [set(criterion(model.train(mode), sample)[2]) for mode in (False, True)]
    assert seen[0] == {"loss", "nll_loss", "ntokens", "nsentences", "sample_size"}
    assert {"forwards", "kappa_entropy", "kappa_ratio", "alpha_entropy", "alpha_ratio"} <= seen[1]


def test_the_mean_over_forward_passes_is_shown() -> None:
    with metrics.aggregate(new_root=True) as shown:
        WeightedLabelSmoothedCrossEntropy.reduce_metrics(logs())
    values = shown.get_smoothed_values()
    assert float(values["kappa_entropy"]) == 1.667
    assert float(values["alpha_ratio"]) == 3.333
    assert set(values) == {"loss", "nll_loss", "ppl", "kappa_entropy", "alpha_ratio"}
    with metrics.aggregate(new_root=True) as shown:
        for log in logs():  # two updates
            WeightedLabelSmoothedCrossEntropy.reduce_metrics([log])
    assert float(shown.get_smoothed_values()["alpha_ratio"]) == (2 + 8 / 2) / 2
