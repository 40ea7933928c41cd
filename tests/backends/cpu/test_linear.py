"""Products through oneDNN against torch's own, in value and gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.backends.cpu import linear as module
from fairseq_plugins.backends.cpu.convolution import FastGatedConvolution
from fairseq_plugins.backends.cpu.linear import FastLinear, linear
from fairseq_plugins.backends.cpu.packed import has_onednn

onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where oneDNN is faster; counts its products."""
    counted: list[int] = []
    multiply = module._onednn
    monkeypatch.setattr(module, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(module, "_onednn", lambda *tensors: counted.append(1) or multiply(*tensors))
    return counted


@onednn
@pytest.mark.parametrize("shape", [(256, 96), (8, 32, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_a_linear_map(calls: list[int], shape: tuple[int, ...], bias: bool, transposed: bool) -> None:
    torch.manual_seed(1)
    x, w, b, g = torch.randn(shape), torch.randn(96, 128).t(), torch.randn(128) if bias else None, torch.randn(128)
    w = w if transposed else w.contiguous()
    results = []
    for multiply, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        inputs = [None if part is None else part.to(dtype).detach().requires_grad_() for part in (x, w, b)]
        y = multiply(*inputs)
        (y * g).sum().backward()
        results.append([y, *(part.grad for part in inputs if part is not None)])
    assert len(calls) == 3
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@onednn
def test_gradients_that_nobody_wants_are_not_computed(calls: list[int]) -> None:
    made = FastLinear(96, 128)
    made(torch.randn(256, 96)).sum().backward()
    assert len(calls) == 2
    made.requires_grad_(False)
    made(torch.randn(256, 96, requires_grad=True)).sum().backward()
    assert len(calls) == 4


@onednn
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_lie_in_memory_as_the_weight(calls: list[int], transposed: bool) -> None:
    w = torch.randn(96, 128).t() if transposed else torch.randn(128, 96)
    y = linear(torch.randn(256, 96), w.requires_grad_())
    (gradient,) = torch.autograd.grad(y.sum(), w)
    assert gradient.stride() == w.stride()


def test_where_torchs_own_products_stay(calls: list[int]) -> None:
    """Very small ones, other precisions, and autocast."""
    w = torch.randn(128, 96)
    linear(torch.randn(2, 96), w)
    linear(torch.randn(256, 96).double(), w.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(256, 96), w).dtype == torch.bfloat16
    assert not calls


@onednn
@pytest.mark.parametrize(("kernel", "causal"), [(1, False), (2, False), (3, False), (3, True), (4, False)])
def test_convolutions_through_windows(calls: list[int], kernel: int, causal: bool) -> None:
    torch.manual_seed(1)
    convolution, x = FastGatedConvolution(64, 64, kernel, causal), torch.randn(20, 16, 64)
    results = []
    for made, start in ((convolution, x), (FastGatedConvolution(64, 64, kernel, causal).double(), x.double())):
        made.load_state_dict(convolution.state_dict())
        start = start.requires_grad_()
        y = made(start)
        y.square().sum().backward()
        results.append([y, start.grad, *(parameter.grad for parameter in made.parameters())])
    assert calls
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("wish", "family", "chosen"),
    [
        ("", ("AuthenticAMD", 26), True),
        ("", ("AuthenticAMD", 25), False),
        ("", ("GenuineIntel", 26), False),
        ("", None, False),
        ("0", ("AuthenticAMD", 26), False),
        ("1", None, True),
    ],
)
def test_which_library_is_no_matter_of_chance(monkeypatch, wish: str, family: object, chosen: bool) -> None:
    """The two round in other ways: what is resumed on the same machine computes as before."""
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", wish)
    monkeypatch.setattr(module, "_family", lambda: family)
    assert module._onednn_is_faster.__wrapped__() is chosen


def test_a_wish_that_is_none(monkeypatch) -> None:
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", "yes")
    with pytest.raises(
        ValueError, match=r"^FAIRSEQ_PLUGINS_ONEDNN is 'yes': 1 multiplies through oneDNN, 0 through MKL$"
    ):
        module._onednn_is_faster.__wrapped__()


def test_the_processor_is_known(monkeypatch) -> None:
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert module._family() == ("AuthenticAMD", 26)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\nCPU implementer\t: 0x41\n")
    assert module._family() is None
