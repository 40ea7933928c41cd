"""The packed linear map against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.backends.cpu.packing import map_of
from tests.operators import Operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 80])
@pytest.mark.parametrize("contiguous", [True, False])
@torch.no_grad()
def test_equals_linear(dtype: torch.dtype, rows: int, contiguous: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(33, 48, dtype=dtype) if contiguous else torch.randn(48, 33, dtype=dtype).t()
    bias = torch.randn(33, dtype=dtype)
    apply = map_of(weight, bias, rows)
    for fewer in {rows, max(1, rows // 2), 1}:
        x = torch.randn(fewer, 48, dtype=dtype)
        torch.testing.assert_close(apply(x), F.linear(x, weight, bias))


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch cannot pack",
)
@pytest.mark.parametrize(
    ("dtype", "rows", "packed"),
    [(torch.float32, 80, 1), (torch.float32, 2, 1), (torch.float32, 1, 0), (torch.float64, 80, 0)],
)
@torch.no_grad()
def test_what_is_packed(dtype: torch.dtype, rows: int, packed: int) -> None:
    """Once when the map is made; a call then is one product with the packed weight."""
    weight, bias, x = torch.randn(33, 48, dtype=dtype), torch.randn(33, dtype=dtype), torch.randn(rows, 48, dtype=dtype)
    with Operators() as making:
        apply = map_of(weight, bias, rows)
    with Operators() as calling:
        apply(x)
    assert making.count("mkldnn._reorder_linear_weight") == packed
    assert calling.count("mkldnn._linear_pointwise") == packed
    assert calling.count("aten.addmm") == 1 - packed
