"""The loss over candidates, compared with the same formulas over the whole vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_plugins.vocabulary.candidates import Candidates, VocabSelectionCrossEntropy

PAD, EOS = 1, 2


def candidates(dictionary: Dictionary, everything: bool = False) -> Candidates:
    """Return candidates: special symbols, words 4 to 7, and word 30 for each source word; or all words."""
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[: len(dictionary) if everything else 8] = True
    return Candidates(torch.full((len(dictionary), 1), 30), always)


def criterion(dictionary: Dictionary, found: Candidates, epsilon: float = 0.1, average: bool = False, **options: Any):
    task = SimpleNamespace(target_dictionary=dictionary, candidates=found)
    return VocabSelectionCrossEntropy(task, sentence_avg=average, label_smoothing=epsilon, **options)


def independent(model: Any, sample: dict[str, Any], words: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return loss and NLL by formula: each wrong candidate has probability ε/(n-1), and the reference the rest."""
    target = sample["target"].flatten()
    logits = model(**sample["net_input"])[0].flatten(0, 1)
    log_probabilities = (logits[:, words].exp() / logits[:, words].exp().sum(dim=1, keepdim=True)).log()
    wanted = (words == target.unsqueeze(1)).double()
    assert bool((wanted.sum(dim=1) == 1).all())
    smooth = wanted * (1 - epsilon) + (1 - wanted) * epsilon / (len(words) - 1)
    real = target.ne(PAD)
    return -(smooth * log_probabilities).sum(dim=1)[real].sum(), -(wanted * log_probabilities).sum(dim=1)[real].sum()


def assert_same_gradients(models: list[Any], losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("epsilon", [0, 0.1])
def test_loss_and_gradients(models: list[Any], sample: dict[str, Any], dictionary: Dictionary, epsilon: float) -> None:
    words = torch.tensor(sorted({*range(8), 30, *sample["target"].flatten().tolist()}), device=sample["target"].device)
    assert 12 < len(words) < 20
    loss, size, log = criterion(dictionary, candidates(dictionary), epsilon)(models[0], sample)
    expected, nll = independent(models[1], sample, words, epsilon)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log["nll_loss"], nll.detach(), rtol=1e-10, atol=1e-10)
    assert (size, log["sample_size"], log["candidates"]) == (12, 12, len(words))
    assert "n_correct" not in log, "accuracy is an option"
    assert_same_gradients(models, [loss, expected])


@pytest.mark.parametrize("average", [False, True])
def test_all_words_are_label_smoothed_cross_entropy(models, sample, dictionary, average) -> None:
    everything = candidates(dictionary, everything=True)
    ours = criterion(dictionary, everything, average=average, report_accuracy=True)
    theirs = LabelSmoothedCrossEntropyCriterion(ours.task, average, 0.1, report_accuracy=True)
    (loss, size, log), (expected, other_size, other_log) = ours(models[0], sample), theirs(models[1], sample)
    assert size == other_size == (3 if average else 12)
    assert (log.pop("candidates"), log.pop("batches"), int(log.pop("covered"))) == (len(dictionary), 1, 12)
    assert log.keys() == other_log.keys()
    for name, value in log.items():
        assert float(value) == pytest.approx(float(other_log[name]), rel=1e-10), name
    assert_same_gradients(models, [loss, expected])


@torch.no_grad()
def test_one_loss_for_each_word(models: list[Any], sample: Any, dictionary: Dictionary) -> None:
    ours = criterion(dictionary, candidates(dictionary))
    each, total = ours(models[0], sample, reduce=False)[0], ours(models[0], sample)[0]
    assert each.numel() == sample["target"].numel()
    torch.testing.assert_close(each.sum(), total)


@pytest.mark.parametrize("attributes", [{}, {"candidates": None}])
def test_a_task_without_candidates_is_refused(dictionary: Dictionary, attributes: dict[str, None]) -> None:
    task = SimpleNamespace(target_dictionary=dictionary, **attributes)
    with pytest.raises(ValueError, match="--candidates"):
        VocabSelectionCrossEntropy.build_criterion(LabelSmoothedCrossEntropyCriterionConfig(), task)
