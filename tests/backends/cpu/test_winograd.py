"""Convolutions in fewer multiplications against torch's own, in value and gradient, and when they are taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.backends.cpu import winograd
from fairseq_plugins.backends.cpu.convolution import FastGatedConvolution, lay_out_
from fairseq_plugins.backends.cpu.packing import Packing
from fairseq_plugins.backends.cpu.products import PRECISIONS, has_onednn
from fairseq_plugins.nn.gated_convolution import GatedConvolution
from fairseq_plugins.nn.weight_norm import without_weight_norm
from tests.operators import Operators

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(prefer_onednn: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where MKL is as fast as oneDNN; counts the convolutions."""
    counted: list[int] = []
    convolve = winograd.convolve
    prefer_onednn(False)
    monkeypatch.setattr(winograd, "convolve", lambda *given: counted.append(1) or convolve(*given))
    return counted


def plain(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
    y = F.conv1d(F.pad(x.permute(1, 2, 0), padding), weight.permute(2, 1, 0), bias)
    return y.permute(2, 0, 1)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("padding", [(2, 0), (1, 1), (0, 2)])
def test_it_is_a_convolution(length: int, padding: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, bias = torch.randn(5, length, 24).transpose(0, 1), torch.randn(40)
    weight = torch.randn(40, 3, 24).permute(1, 2, 0)  # as `lay_out_` does
    g = torch.randn(40, 5, length).transpose(0, 2).double()
    results = []
    for convolve in (winograd.convolve, plain):
        inputs = [part.double().requires_grad_() for part in (x, weight, bias)]
        y = convolve(*inputs, padding)
        y.backward(g)
        results.append([y, *(part.grad for part in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_training_takes_it(calls: list[int], causal: bool) -> None:
    results = []
    for kind in (FastGatedConvolution, GatedConvolution):
        torch.manual_seed(1)
        made, x = kind(256, 32, kernel=3, causal=causal), torch.randn(32, 16, 256, requires_grad=True)
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
    made = FastGatedConvolution(width, 8, kernel, causal=True).to(dtype)
    with context:
        made(torch.zeros(32, sentences, width, dtype=dtype))
    assert not calls


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@torch.no_grad()
def test_translating_with_packed_weights(length: int, causal: bool, precision: str) -> None:
    """Four products with sums that are packed once, and packed anew when the weights have changed."""
    if not (winograd.sums_pay(precision) and PRECISIONS[precision][1]()):
        pytest.skip(f"no {precision} on this processor")
    torch.manual_seed(1)
    made, packing = without_weight_norm(FastGatedConvolution(512, 32, kernel=3, causal=causal)), Packing(precision)
    lay_out_(made)
    made.bias.normal_()
    x, tolerance = torch.randn(length, 3, 512), {"float32": 1e-5, "bfloat16": 0.03}[precision]
    counts = []
    for _ in range(2):
        for _ in range(2):
            with packing.for_batch(), Operators() as operators:
                y = made(x)
            counts.append(
                [operators.count(f"mkldnn.{name}") for name in ("_reorder_linear_weight", "_linear_pointwise")]
            )
            expected = F.glu(plain(x.double(), made.weight.double(), made.bias.double(), made.padding), dim=-1)
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        made.weight.data[1, 3, 5].add_(1)
    looking = 1  # the product by which a weight is known
    assert counts == [[4, 4 + looking], [0, 4 + looking]] * 2


@pytest.mark.parametrize(
    ("width", "kernel", "precision"), [(511, 3, "float32"), (512, 5, "float32"), (512, 2, "float32"), (512, 3, "int8")]
)
@torch.no_grad()
def test_what_is_translated_without(calls: list[int], width: int, kernel: int, precision: str) -> None:
    if not PRECISIONS[precision][1]():
        pytest.skip(f"this processor has no {precision}")
    made = without_weight_norm(FastGatedConvolution(width, 8, kernel, causal=True))
    with Packing(precision).for_batch():
        made(torch.zeros(32, 16, width))
    assert not calls


@pytest.mark.parametrize(
    ("precision", "amx", "pays"),
    [("float32", True, True), ("bfloat16", False, True), ("bfloat16", True, False), ("int8", False, False)],
)
def test_fewer_products_pay_where_each_is_slow(monkeypatch, precision: str, amx: bool, pays: bool) -> None:
    """AMX multiplies bfloat16 several times as fast as float32 is multiplied."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setitem(PRECISIONS, precision, (PRECISIONS[precision][0], lambda: True))
    with Packing(precision).for_batch(), torch.no_grad():
        assert winograd.pays(torch.zeros(8, 16, 512), kernel=3) is pays


def test_where_onednn_is_much_faster_it_multiplies_with_windows(calls: list[int], prefer_onednn) -> None:
    prefer_onednn(True)
    FastGatedConvolution(256, 8, kernel=3, causal=True)(torch.zeros(32, 16, 256))
    assert not calls
