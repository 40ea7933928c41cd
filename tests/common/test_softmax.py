"""The softmax of attention in half precision, against one in float64."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.common.source import softmax
from tests.operators import Operators


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """The nearest number of that precision, which a softmax in half precision misses."""
    torch.manual_seed(1)
    scores = (4 * torch.randn(50, 400)).to(dtype)
    exact = torch.softmax(scores.double(), dim=-1)
    # Half a unit in the last place; below the smallest normal number units are all alike.
    info = torch.finfo(dtype)
    allowed = 0.5 * info.eps * exact.clamp(min=info.tiny) * 1.001
    assert (softmax(scores).double() - exact).abs().le(allowed).all()
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    in_half = powers / powers.sum(dim=-1, keepdim=True)
    assert not (in_half.double() - exact).abs().le(allowed).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_is_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    """Whatever this processor's kernel for half precision does inside."""
    with Operators() as operators:
        result = softmax(torch.randn(3, 4, dtype=dtype))
    assert result.dtype == dtype
    assert operators.dtypes("aten._softmax") == {torch.float64 if dtype == torch.float64 else torch.float32}
