"""The prepared linear map against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.cpu.packing import prepare_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 80])
@pytest.mark.parametrize("contiguous", [True, False])
@torch.no_grad()
def test_equals_linear(dtype: torch.dtype, rows: int, contiguous: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(33, 48, dtype=dtype) if contiguous else torch.randn(48, 33, dtype=dtype).t()
    bias = torch.randn(33, dtype=dtype)
    apply = prepare_linear(weight, bias, rows)
    for fewer in {rows, max(1, rows // 2), 1}:
        x = torch.randn(fewer, 48, dtype=dtype)
        torch.testing.assert_close(apply(x), F.linear(x, weight, bias))
