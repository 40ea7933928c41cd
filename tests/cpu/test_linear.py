"""Products by oneDNN and block-diagonal products, compared with torch's in values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.cpu.linear import add_block_diagonal, batched, linear, onednn_is_faster
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
    """The choice depends on the CPU only: libraries round differently, and a resumed training must not change."""
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", choice)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: processor)
    assert onednn_is_faster.__wrapped__() is chosen


def test_an_invalid_choice(monkeypatch) -> None:
    monkeypatch.setenv("FAIRSEQ_PLUGINS_ONEDNN", "yes")
    with pytest.raises(ValueError, match="FAIRSEQ_PLUGINS_ONEDNN"):
        onednn_is_faster.__wrapped__()


def test_in_place_equals_batched() -> None:
    torch.manual_seed(1)
    y, x, w = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 12), (5, 6), (3, 2, 4)))

    def add(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return add_block_diagonal(y.clone(), x, w)

    torch.testing.assert_close(add(y, x, w), batched(y, x, w))
    assert torch.autograd.gradcheck(add, (y, x, w))
    given = y.detach().clone()
    assert add_block_diagonal(given, x.detach(), w.detach()) is given
