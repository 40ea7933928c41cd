"""A branched block on a processor against its equations, and products into their places."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_plugins.backends.cpu.branches import FastBranchedBlock, add_in_place
from fairseq_plugins.backends.cpu.packing import Packing
from fairseq_plugins.nn.branched_block import BranchedBlock, add_block_diagonal


@pytest.mark.parametrize("gating_topk", [None, 2])
def test_it_computes_the_equations(gating_topk: int | None) -> None:
    torch.manual_seed(1)
    made = FastBranchedBlock(
        12,
        24,
        3,
        mode="learned",
        constraint="simplex",
        gating_topk=gating_topk,
        dropout=0.0,
        relu_dropout=0.0,
        owner="test",
    ).double()
    results = []
    for form in (made, made.plain, lambda x, heads: BranchedBlock.forward(made, x, heads)):
        torch.manual_seed(2)
        x, heads = (torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
        made.zero_grad()
        out = form(x, heads)
        (out * torch.randn_like(out)).sum().backward()
        results.append([out, heads.grad, x.grad, *(part.grad.clone() for part in made.parameters())])
    for fast, plain, folded in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(folded, plain, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_gate_is_never_rounded(build, device) -> None:
    """It decides which branches a token gets; so many tokens are multiplied in int8 elsewhere."""
    gate = build("weighted_transformer_tiny", branch_gating_topk=1).encoder.layers[0].branches.gate
    x = torch.randn(2**15, gate.projection.in_features, device=device)
    expected = gate(x)
    with Packing("int8").for_batch():
        assert torch.equal(gate(x), expected)


@torch.no_grad()
def test_what_is_kept_is_no_parameter() -> None:
    """Which may be overwritten, while a copy of the block still translates with what has been kept."""
    torch.manual_seed(1)
    options = {"mode": "learned", "constraint": "simplex", "gating_topk": 2, "dropout": 0.0, "relu_dropout": 0.0}
    block = FastBranchedBlock(64, 256, 4, owner="test", **options).eval()
    twin, packing = copy.deepcopy(block), Packing()
    x, heads = torch.randn(3, 7, 64), torch.randn(3, 7, 64)
    with packing.for_batch():
        block(x, heads)
    expected = twin(x, heads)
    block.second.weight.mul_(3)
    with packing.for_batch():
        torch.testing.assert_close(twin(x, heads), expected)


def test_products_into_their_places() -> None:
    torch.manual_seed(1)
    y, x, w = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 12), (5, 6), (3, 2, 4)))

    def add(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return add_in_place(y.clone(), x, w)

    torch.testing.assert_close(add(y, x, w), add_block_diagonal(y, x, w))
    assert torch.autograd.gradcheck(add, (y, x, w))
    given = y.detach().clone()
    assert add_in_place(given, x.detach(), w.detach()) is given
