"""Products by oneDNN against torch's, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.convs2s.layers import GatedConvolution
from fairseq_plugins.cpu.linear import linear, onednn_is_faster
from fairseq_plugins.cpu.packing import has_onednn
from tests.operators import Operators

onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def products(prefer_onednn: Callable[[bool], None]) -> Iterator[Callable[[], int]]:
    """Choose oneDNN, and return a function that counts its products."""
    prefer_onednn(True)
    with Operators() as operators:
        yield lambda: operators.count("mkldnn._linear_pointwise")


@onednn
@pytest.mark.parametrize("shape", [(256, 96), (8, 32, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_a_linear_map(products: Callable[[], int], shape: tuple[int, ...], bias: bool, transposed: bool) -> None:
    torch.manual_seed(1)
    x, w, b, g = torch.randn(shape), torch.randn(96, 128).t(), torch.randn(128) if bias else None, torch.randn(128)
    w = w if transposed else w.contiguous()
    results = []
    for multiply, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        inputs = [None if part is None else part.to(dtype).detach().requires_grad_() for part in (x, w, b)]
        y = multiply(*inputs)
        (y * g).sum().backward()
        results.append([y, *(part.grad for part in inputs if part is not None)])
    assert products()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_products_that_torch_computes(products: Callable[[], int]) -> None:
    """Small products, other precisions, and autocast."""
    w = torch.randn(128, 96)
    linear(torch.randn(2, 96), w)
    linear(torch.randn(256, 96).double(), w.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(256, 96), w).dtype == torch.bfloat16
    assert products() == 0


@onednn
@pytest.mark.parametrize(("kernel", "causal"), [(1, False), (2, False), (3, False), (3, True), (4, False)])
def test_convolutions_through_windows(products: Callable[[], int], kernel: int, causal: bool) -> None:
    torch.manual_seed(1)
    convolution, x = GatedConvolution(64, 64, kernel, causal), torch.randn(20, 16, 64)
    results = []
    for made, start in ((convolution, x), (GatedConvolution(64, 64, kernel, causal).double(), x.double())):
        made.load_state_dict(convolution.state_dict())
        start = start.requires_grad_()
        y = made(start)
        y.square().sum().backward()
        results.append([y, start.grad, *(parameter.grad for parameter in made.parameters())])
    assert products()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-3, atol=1e-4)


def cpuinfo(maker: str, family: int) -> str:
    one = f"vendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    return f"processor\t: 0\n{one}\nprocessor\t: 1\n{one}"


@pytest.mark.parametrize(
    ("choice", "processor", "chosen"),
    [
        ("", cpuinfo("AuthenticAMD", 26), True),
        ("", cpuinfo("AuthenticAMD", 25), False),
        ("", cpuinfo("GenuineIntel", 26), False),
        ("", "processor\t: 0\nCPU implementer\t: 0x41\n", False),
        ("0", cpuinfo("AuthenticAMD", 26), False),
        ("1", "", True),
    ],
)
def test_the_choice_of_the_library(monkeypatch, choice: str, processor: str, chosen: bool) -> None:
    """It depends on the CPU only, because the libraries round differently and a resumed training must not change."""
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", choice)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: processor)
    assert onednn_is_faster.__wrapped__() is chosen


def test_an_invalid_choice(monkeypatch) -> None:
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", "yes")
    with pytest.raises(ValueError, match="FAIRSEQ_PLUGINS_ONEDNN"):
        onednn_is_faster.__wrapped__()
