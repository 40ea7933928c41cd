"""Each form of the convolutions against torch's in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.cpu.convolution import as_matrix, convolve_channels_first, convolve_time_first, with_window_layout
from fairseq_plugins.cpu.packing import PackedWeightCache


@pytest.mark.parametrize("form", ["torch", "oneDNN", "packed"])
@pytest.mark.parametrize(("kernel", "padding"), [(1, (0, 0)), (3, (2, 0)), (3, (1, 1)), (4, (1, 2))])
@pytest.mark.parametrize("laid_out", [False, True])
@torch.no_grad()
def test_time_first(prefer_onednn: Callable[[bool], None], form: str, kernel: int, padding, laid_out: bool) -> None:
    prefer_onednn(form == "oneDNN")
    torch.manual_seed(1)
    x, weight, bias = torch.randn(9, 64, 48), torch.randn(kernel, 48, 96), torch.randn(96)
    if laid_out:
        weight = with_window_layout(weight)
        assert as_matrix(weight).is_contiguous()
    with PackedWeightCache().for_batch() as batch:
        y = convolve_time_first(x, weight, bias, padding, batch if form == "packed" else None)
    columns = F.pad(x.double().permute(1, 2, 0), padding)
    expected = F.conv1d(columns, weight.double().permute(2, 1, 0), bias.double()).permute(2, 0, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("kernel", "padding"), [(1, (0, 0)), (3, (1, 1)), (4, (1, 2))])
def test_channels_first(grad: bool, kernel: int, padding: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(3, 24, 7), torch.randn(40, 24, kernel), torch.randn(40)
    with torch.set_grad_enabled(grad):
        y = convolve_channels_first(x, weight, bias, padding)
    torch.testing.assert_close(y, F.conv1d(F.pad(x, padding), weight, bias), rtol=1e-5, atol=1e-5)
