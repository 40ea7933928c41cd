"""Dropout on a CPU: its distribution and gradient, and a comparison with plain PyTorch for the same mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.cpu.training import Dropout, dropout

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
    """Values and gradients are equal, and are dropped at the same places."""
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
