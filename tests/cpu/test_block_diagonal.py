"""In-place block-diagonal products against the batched product."""

from __future__ import annotations

import torch

from fairseq_plugins.cpu.linear import add_block_diagonal, batched


def test_in_place_equals_batched() -> None:
    torch.manual_seed(1)
    y, x, w = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 12), (5, 6), (3, 2, 4)))

    def add(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return add_block_diagonal(y.clone(), x, w)

    torch.testing.assert_close(add(y, x, w), batched(y, x, w))
    assert torch.autograd.gradcheck(add, (y, x, w))
    given = y.detach().clone()
    assert add_block_diagonal(given, x.detach(), w.detach()) is given
