"""Convolutions in fewer multiplications against torch's own, in value and gradient, and when they are taken."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.nn import linear, winograd
from fairseq_plugins.nn.gated_convolution import GatedConvolution
from fairseq_plugins.nn.packed_linear import has_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where MKL is as fast as oneDNN; counts the convolutions."""
    counted: list[int] = []
    convolve = winograd.convolve
    monkeypatch.setattr(linear, "_onednn_is_faster", lambda: False)
    monkeypatch.setattr(winograd, "convolve", lambda *given: counted.append(1) or convolve(*given))
    return counted


def plain(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
    return torch.conv_tbc(F.pad(x, (0, 0, 0, 0, *padding)), weight, bias)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("padding", [(2, 0), (1, 1), (0, 2)])
def test_it_is_a_convolution(length: int, padding: tuple[int, int]) -> None:
    torch.manual_seed(1)
    parts = torch.randn(length, 5, 24), torch.randn(3, 24, 40), torch.randn(40)
    g = torch.randn(length, 5, 40)
    results = []
    for convolve, dtype in ((winograd.convolve, torch.float32), (plain, torch.float64)):
        inputs = [part.to(dtype, copy=True).detach().requires_grad_() for part in parts]
        y = convolve(*inputs, padding)
        y.backward(g.to(dtype))
        results.append([y, *(part.grad for part in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_training_takes_it(calls: list[int], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    made = GatedConvolution(256, 32, kernel=3, causal=causal)
    start = torch.randn(33, 16, 256)
    results = []
    for narrowest in (256, 257):
        monkeypatch.setattr(winograd, "_NARROWEST", narrowest)
        x = start.clone().requires_grad_()
        made.zero_grad()
        y = made(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in made.parameters())])
    assert len(calls) == 1
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("width", "sentences", "kernel", "context", "dtype"),
    [
        (256, 15, 3, nullcontext(), torch.float32),
        (255, 16, 3, nullcontext(), torch.float32),
        (256, 16, 5, nullcontext(), torch.float32),
        (256, 16, 3, torch.no_grad(), torch.float32),
        (256, 16, 3, torch.autocast("cpu", torch.bfloat16), torch.float32),
        (256, 16, 3, nullcontext(), torch.float64),
    ],
    ids=["few inputs", "narrow", "kernel", "translating", "autocast", "double"],
)
def test_what_goes_without(calls: list[int], width: int, sentences: int, kernel: int, context, dtype) -> None:
    made = GatedConvolution(width, 8, kernel, causal=True).to(dtype)
    with context:
        made(torch.zeros(32, sentences, width, dtype=dtype))
    assert not calls


def test_where_onednn_is_much_faster_it_multiplies_with_windows(calls: list[int], monkeypatch) -> None:
    monkeypatch.setattr(linear, "_onednn_is_faster", lambda: True)
    GatedConvolution(256, 8, kernel=3, causal=True)(torch.zeros(32, 16, 256))
    assert not calls
