"""The folded branches against equations 6 and 7 as they are written."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.nn.block_diagonal import block_diagonal_linear
from fairseq_plugins.nn.branched_feed_forward import BranchedFeedForward


def branches(**options: object) -> BranchedFeedForward:
    torch.manual_seed(1)
    settings = {
        "shared": False,
        "mode": "learned",
        "constraint": "simplex",
        "rescale": True,
        "gating_topk": None,
        "relu_dropout": 0.0,
        "owner": "test",
    }
    block = BranchedFeedForward(12, 24, 3, **{**settings, **options}).double()
    torch.nn.init.normal_(block.b1)
    torch.nn.init.normal_(block.b2)
    return block


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("constraint", ["simplex", "softmax"])
@pytest.mark.parametrize("gating_topk", [None, 1, 2, 3])
def test_folded_equals_plain(device: torch.device, shared: bool, constraint: str, gating_topk: int | None) -> None:
    """Values, and the gradients of heads, inputs and all parameters, in float64."""
    block = branches(shared=shared, constraint=constraint, gating_topk=gating_topk).to(device)
    results = []
    for form in (block, block.plain):
        torch.manual_seed(2)
        heads, x = (torch.randn(2, 5, 12, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
        block.zero_grad()
        out = form(heads, x)
        (out * torch.randn_like(out)).sum().backward()
        assert all(parameter.grad is not None for parameter in block.parameters())
        gradients = [parameter.grad.clone() for parameter in block.parameters()]
        results.append([out, heads.grad, x.grad, *gradients])
    for folded, plain in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-10, atol=1e-10)


def test_the_scale_of_the_weights() -> None:
    """The form with weights of sum one is that with weights of mean one, W^O and W_2 divided by M."""
    literal, rescaled = branches(rescale=False), branches(rescale=True)
    with torch.no_grad():
        for parameter in (rescaled.head_out, rescaled.w2, rescaled.b2):
            parameter.div_(3)
    heads, x = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 4, 12, dtype=torch.float64)
    torch.testing.assert_close(rescaled(heads, x), literal(heads, x))


def test_a_gate_keeps_its_k_largest() -> None:
    block = branches(gating_topk=2)
    weights = block.gate(torch.randn(7, 12, dtype=torch.float64))
    assert (weights > 0).sum(dim=-1).tolist() == [2] * 7
    torch.testing.assert_close(weights.sum(dim=-1), torch.full((7,), 2.0, dtype=torch.float64))


def test_block_diagonal_gradients() -> None:
    torch.manual_seed(1)
    x, w, b = torch.randn(5, 6), torch.randn(3, 2, 4), torch.randn(12)
    inputs = tuple(tensor.double().requires_grad_() for tensor in (x, w, b))
    dense = torch.block_diag(*w.double())
    torch.testing.assert_close(block_diagonal_linear(*inputs), x.double() @ dense + b.double())
    assert torch.autograd.gradcheck(block_diagonal_linear, inputs)
