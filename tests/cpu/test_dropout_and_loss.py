"""Dropout and the label-smoothed loss on a CPU, compared with plain PyTorch and with fairseq."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss as plain
from torch import Tensor

from fairseq_plugins.cpu import dropout_and_loss
from fairseq_plugins.cpu.dropout_and_loss import Dropout, dropout, label_smoothed_nll_loss
from fairseq_plugins.vocabulary.candidates import VocabSelectionCrossEntropy
from fairseq_plugins.weighted_transformer.training import WeightedLabelSmoothedCrossEntropy

P = 0.3  # 65536 p is rounded up
NUMBERS = 2**20


def mask(seed: int, shape: int | tuple[int, ...], p: float = P) -> Tensor:
    """Return 1 for each kept element and 0 for each dropped one, as float64."""
    torch.manual_seed(seed)
    return (dropout(torch.ones(shape), p) > 0).double()


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    """The share of all elements, and of each 16-bit part of a draw, is within five standard deviations of its mean."""
    kept = mask(1, NUMBERS, p=p)
    for part in (kept, *kept.view(-1, 4).unbind(1)):
        assert abs(part.mean() - (1 - p)) < 5 * (p * (1 - p) / len(part)) ** 0.5 + 2**-17


def test_elements_are_dropped_independently() -> None:
    """Elements at distances up to 64, and elements of two calls, are uncorrelated within five standard deviations."""
    first, second = (kept - kept.mean() for kept in (mask(1, NUMBERS), mask(2, NUMBERS)))
    variance, bound = P * (1 - P), 5 / NUMBERS**0.5
    assert abs((first * second).mean()) < bound * variance
    for distance in range(1, 65):
        assert abs((first[distance:] * first[:-distance]).mean()) < bound * variance, distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 3, 11), (4, 1), (0, 3), ()])
def test_it_is_the_plain_form_with_the_same_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, grad = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    kept = mask(4, shape)
    torch.manual_seed(4)
    y = dropout(x, P)
    y.backward(grad)
    plain = x.detach().clone().requires_grad_()
    expected = plain * kept.to(dtype) / (1 - P)
    expected.backward(grad)
    torch.testing.assert_close(y, expected, rtol=1e-4 if dtype != torch.bfloat16 else 1e-2, atol=0)
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4 if dtype != torch.bfloat16 else 1e-2, atol=0)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts_of_memory(layout: str) -> None:
    x = torch.rand(6, 7, 8) + 1
    x = {"transposed": x.transpose(0, 2), "sliced": x[::2, 1:], "expanded": x[:1].expand(6, -1, -1)}[layout]
    torch.manual_seed(1)
    y = dropout(x, 0.5)
    assert 0.3 < y.eq(0).double().mean() < 0.7
    torch.testing.assert_close(y, torch.where(y == 0, 0, 2 * x))
    if layout == "expanded":
        assert not torch.equal(y[0] == 0, y[1] == 0)


def test_nothing_and_everything() -> None:
    x = torch.rand(8, 8) + 1
    assert dropout(x, 0.0) is x
    assert not dropout(x, 1.0).any()
    assert torch.equal(dropout(x, 1e-9), x / (1 - 1e-9))


def test_when_a_module_drops() -> None:
    """A module drops in training, or in evaluation if ``--retain-dropout-modules`` names it, as in fairseq."""
    module, x = Dropout(P, module_name="Here"), torch.ones(1000)
    assert module.train()(x).eq(0).any()
    assert module.eval()(x) is x
    module.make_generation_fast_("module", retain_dropout=True, retain_dropout_modules=["There"])
    assert module(x) is x
    module.make_generation_fast_("module", retain_dropout=True, retain_dropout_modules=["Here"])
    assert module(x).eq(0).any()


def test_in_a_compiled_program() -> None:
    """A compiled program uses torch's dropout, because the compiler would split the program at ours."""
    torch.manual_seed(1)
    x = torch.ones(1000)
    y = torch.compile(lambda x: dropout(x, P), fullgraph=True, backend="eager")(x)
    torch.manual_seed(1)
    assert torch.equal(y, F.dropout(x, P))


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
@pytest.mark.parametrize("overwrite", [False, True])
def test_it_is_fairseqs(
    dtype: torch.dtype, epsilon: float, factor: float, rows: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = case(40, dtype)
    monkeypatch.setattr(dropout_and_loss, "_CHUNK", rows * 40 // torch.get_num_threads())

    def fairseqs(logits: Tensor, target: Tensor, epsilon: float, ignored: int) -> tuple[Tensor, Tensor]:
        return plain(torch.log_softmax(logits, dim=-1, dtype=torch.float32), target, epsilon, ignored)

    def fused(logits: Tensor, target: Tensor, epsilon: float, ignored: int) -> tuple[Tensor, Tensor]:
        return label_smoothed_nll_loss(2 * logits, target, epsilon, ignored, overwrite)

    ours = losses_and_gradient(fused, logits / 2, target, epsilon, factor)
    theirs = losses_and_gradient(fairseqs, logits, target, epsilon, factor)
    theirs[2] *= 2
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


def test_float64_is_not_rounded() -> None:
    logits, target = case(40, torch.float64)
    assert torch.autograd.gradcheck(lambda x: label_smoothed_nll_loss(x, target, 0.1, PADDING)[0], logits)


def test_very_unlikely_targets() -> None:
    """The loss is not computed as the logarithm of a probability, which would be rounded to zero."""
    logits = torch.zeros(1, 10)
    logits[0, 3] = 500
    loss, nll = label_smoothed_nll_loss(logits, torch.tensor([4]), 0.1, PADDING)
    assert float(nll) == 500
    assert loss.isfinite()


@pytest.mark.parametrize("options", [{}, {"report_accuracy": True}, {"ignore_prefix_size": 1}])
@pytest.mark.parametrize("reduce", [True, False])
def test_in_a_criterion(build, task, sentences, architecture: str, options, reduce: bool, monkeypatch) -> None:
    """Losses, logs and gradients equal those of fairseq's original criterion."""
    model = build(architecture, dropout=0.0).train()
    target = sentences([4, 2])
    inputs = {"src_tokens": sentences([5, 3]), "src_lengths": torch.tensor([5, 3]), "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": target, "ntokens": 6}
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1, **options)
    results, fused = [], []
    for compute in (
        LabelSmoothedCrossEntropyCriterion.compute_loss,
        inspect.unwrap(LabelSmoothedCrossEntropyCriterion.compute_loss),
    ):
        monkeypatch.setattr(LabelSmoothedCrossEntropyCriterion, "compute_loss", compute)
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        loss, size, log = criterion(twin, sample, reduce)
        fused.append("_SmoothedLossBackward" in loss.grad_fn.name())
        loss.sum().backward()
        results.append([loss.detach(), size, log, {name: each.grad for name, each in twin.named_parameters()}])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert fused == [reduce and "ignore_prefix_size" not in options, False]


def test_who_may_overwrite_logits(build, task, sentences, architecture: str) -> None:
    """The gradient overwrites the logits only if nothing else reads them, which a subclass must say itself."""

    class Other(LabelSmoothedCrossEntropyCriterion):
        pass

    class Forgetful(LabelSmoothedCrossEntropyCriterion):
        forgets_logits = True

    class Heir(Forgetful):
        pass

    def overwrites(
        criterion: LabelSmoothedCrossEntropyCriterion, name: str = architecture, decoder: type | None = None
    ) -> bool:
        model, target = build(name, enlivened=False), sentences([4, 2])
        model.decoder.__class__ = decoder or type(model.decoder)
        output = model(sentences([5, 3]), torch.tensor([5, 3]), target)
        before = output[0].detach().clone()
        criterion.compute_loss(model, output, {"target": target})[0].backward()
        return not torch.equal(before, output[0])

    class Reader(type(build(architecture).decoder)):
        def output_layer(self, features, **unused):
            return super().output_layer(features)

    for kind, expected in (
        (LabelSmoothedCrossEntropyCriterion, True),
        (WeightedLabelSmoothedCrossEntropy, True),
        (Forgetful, True),
        (Other, False),
        (Heir, False),
    ):
        assert overwrites(kind(task, False, 0.1)) is expected
        assert not overwrites(kind(task, False, 0.1, report_accuracy=True))
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    assert not overwrites(criterion, "transformer")
    assert not overwrites(criterion, decoder=Reader)
    assert vars(VocabSelectionCrossEntropy)["forgets_logits"]


def test_logits_stay_without_gradients() -> None:
    logits, target = case(40, torch.float32)
    logits = 2 * logits
    before = logits.detach().clone()
    with torch.no_grad():
        label_smoothed_nll_loss(logits, target, 0.1, PADDING, overwrite=True)
    assert torch.equal(before, logits)


def test_overwritten_logits_are_not_used_for_other_gradients() -> None:
    """autograd refuses a second loss whose gradient needs the overwritten logits."""
    logits, target = case(40, torch.float32)
    logits = 2 * logits
    other = logits.square().sum()
    loss, _ = label_smoothed_nll_loss(logits, target, 0.1, PADDING, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_another_softmax_stays(build, task, sentences, architecture: str) -> None:
    """The loss of a model with its own probability function uses these probabilities."""
    model = build(architecture)
    decoder = model.decoder

    class Sharper(type(decoder)):
        def get_normalized_probs(self, net_output, log_probs, sample=None):
            return super().get_normalized_probs((2 * net_output[0], None), log_probs, sample)

    target = sentences([4, 2])
    sample = {"target": target}
    output = model(sentences([5, 3]), None, target)
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    before, _ = criterion.compute_loss(model, output, sample)
    decoder.__class__ = Sharper
    output = model(sentences([5, 3]), None, target)  # the gradient may have overwritten the logits
    after, _ = criterion.compute_loss(model, output, sample)
    expected, _ = inspect.unwrap(LabelSmoothedCrossEntropyCriterion.compute_loss)(criterion, model, output, sample)
    assert float(after) == float(expected)
    assert float(after) != float(before)
