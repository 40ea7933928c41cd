"""The label-smoothed loss in one pass, compared with fairseq's in value and gradient."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss as plain
from torch import Tensor

from fairseq_plugins.cpu import training
from fairseq_plugins.cpu.training import label_smoothed_nll_loss

PADDING = 1


def case(size: int, dtype: torch.dtype, positions: int = 11) -> tuple[Tensor, Tensor]:
    """Return logits far from zero, and targets of which the second is padding."""
    torch.manual_seed(1)
    target = torch.randint(PADDING + 1, size, (positions,))
    target[1] = PADDING
    return (3 * torch.randn(positions, size) + 50).to(dtype).requires_grad_(), target


def losses_and_gradient(function, logits: Tensor, target: Tensor, epsilon: float, factor: float) -> list[Tensor]:
    logits = logits.detach().clone().requires_grad_()
    loss, nll = function(logits, target, epsilon, PADDING)
    (loss * factor).backward()
    return [loss.detach(), nll.detach(), logits.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_it_is_fairseqs(
    dtype: torch.dtype, epsilon: float, factor: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = case(40, dtype)
    monkeypatch.setattr(training, "_CHUNK", rows * 40 // torch.get_num_threads())

    def fairseqs(logits: Tensor, target: Tensor, epsilon: float, ignored: int) -> tuple[Tensor, Tensor]:
        return plain(torch.log_softmax(logits, dim=-1, dtype=torch.float32), target, epsilon, ignored)

    ours, theirs = (
        losses_and_gradient(each, logits, target, epsilon, factor) for each in (label_smoothed_nll_loss, fairseqs)
    )
    assert [each.dtype for each in ours] == [torch.float32, torch.float32, dtype]
    assert not ours[2][1].any()
    bounds = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **bounds)


def test_it_is_as_exact_as_fairseqs() -> None:
    """The error against float64 is at most 1e-6 or twice fairseq's, for a large vocabulary and logits far from zero."""
    logits, target = case(32000, torch.float32)
    exact = plain(torch.log_softmax(logits.double(), -1), target, 0.1, PADDING)
    theirs = plain(torch.log_softmax(logits, -1), target, 0.1, PADDING)
    for ours, fairseqs, value in zip(label_smoothed_nll_loss(logits, target, 0.1, PADDING), theirs, exact, strict=True):
        assert abs(ours - value) <= max(2 * abs(fairseqs - value), 1e-6 * value)


def test_very_unlikely_targets() -> None:
    """The loss is not computed as the logarithm of a probability, which would be rounded to zero."""
    logits = torch.zeros(1, 10)
    logits[0, 3] = 500
    loss, nll = label_smoothed_nll_loss(logits, torch.tensor([4]), 0.1, PADDING)
    assert float(nll) == 500
    assert loss.isfinite()


def criterion(**options) -> LabelSmoothedCrossEntropyCriterion:
    made = LabelSmoothedCrossEntropyCriterion.__new__(LabelSmoothedCrossEntropyCriterion)
    torch.nn.Module.__init__(made)
    settings = {
        "sentence_avg": False,
        "eps": 0.1,
        "ignore_prefix_size": 0,
        "report_accuracy": True,
        "padding_idx": PADDING,
    }
    vars(made).update(settings, **options)
    return made


@pytest.mark.parametrize("options", [{}, {"ignore_prefix_size": 1}])
@pytest.mark.parametrize("reduce", [True, False])
def test_in_a_criterion(build, sentences, architecture: str, options, reduce: bool, monkeypatch) -> None:
    """Losses, logs and gradients equal those of fairseq's original criterion."""
    model = build(architecture, dropout=0.0).train()
    target = sentences([4, 2])
    inputs = {"src_tokens": sentences([5, 3]), "src_lengths": torch.tensor([5, 3]), "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": target, "ntokens": 6}
    results = []
    for compute in (
        LabelSmoothedCrossEntropyCriterion.compute_loss,
        inspect.unwrap(LabelSmoothedCrossEntropyCriterion.compute_loss),
    ):
        monkeypatch.setattr(LabelSmoothedCrossEntropyCriterion, "compute_loss", compute)
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        loss, size, log = criterion(**options)(twin, sample, reduce)
        loss.sum().backward()
        results.append([loss.detach(), size, log, {name: each.grad for name, each in twin.named_parameters()}])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_another_softmax_stays(build, sentences, architecture: str) -> None:
    """The loss of a model with its own probability function uses these probabilities."""
    model = build(architecture)
    decoder = model.decoder

    class Sharper(type(decoder)):
        def get_normalized_probs(self, net_output, log_probs, sample=None):
            return super().get_normalized_probs((2 * net_output[0], None), log_probs, sample)

    target = sentences([4, 2])
    sample = {"target": target}
    output = model(sentences([5, 3]), None, target)
    before, _ = criterion().compute_loss(model, output, sample)
    decoder.__class__ = Sharper
    after, _ = criterion().compute_loss(model, output, sample)
    expected, _ = inspect.unwrap(LabelSmoothedCrossEntropyCriterion.compute_loss)(criterion(), model, output, sample)
    assert float(after) == float(expected)
    assert float(after) != float(before)
