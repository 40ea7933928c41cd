"""Convolutions in pairs of outputs against torch's, for all positions and step by step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from fairseq_plugins.common.decoding import RowOrder
from fairseq_plugins.common.linear import without_weight_norm
from fairseq_plugins.convs2s.layers import GatedConvolution, PairedConvolution
from fairseq_plugins.cpu.convolution import packed_products, pairs_are_faster
from fairseq_plugins.cpu.packing import PRECISIONS, PackedWeightCache, has_onednn, with_packing
from tests.common.stepwise import reorders

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch cannot pack")


def convolution(width: int, kernel: int = 3, causal: bool = True) -> GatedConvolution:
    torch.manual_seed(1)
    made = without_weight_norm(GatedConvolution(width, 32, kernel, causal=causal))
    made.bias.data.normal_()
    return made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@torch.no_grad()
def test_all_positions(length: int, causal: bool) -> None:
    """Convolve before and after a change of the weights."""
    made, packing, x = convolution(512, causal=causal), PackedWeightCache(), torch.randn(length, 3, 512)
    for _ in range(2):
        with packing.for_batch() as batch:
            y = with_packing(made, batch)(x)
        columns = F.pad(x.double().permute(1, 2, 0), made.padding)
        expected = F.conv1d(columns, made.weight.double().permute(2, 1, 0), made.bias.double()).permute(2, 0, 1)
        torch.testing.assert_close(y.double(), F.glu(expected, dim=-1), rtol=1e-5, atol=1e-5)
        made.weight.data[1, 3, 5].add_(1)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(decoding=reorders())
@torch.no_grad()
def test_steps_are_the_convolution_of_each_history(decoding: tuple[int, int, int, list[list[torch.Tensor]]]) -> None:
    sentences, beam, _, steps = decoding
    made = convolution(24)
    history, order = torch.zeros(sentences * beam, 2, 24), RowOrder(sentences * beam, beam)
    products = packed_products(made.matrix, made.bias, "float32")
    state = PairedConvolution(products, torch.zeros(sentences * beam, 24))
    for orders in steps:
        for new_order in orders:
            order.reorder(new_order)
            history = history[new_order]
        rows, _ = order.take_pending()
        x = torch.randn(history.size(0), 24)
        history = torch.cat([history, x.unsqueeze(1)], dim=1)
        expected = F.linear(history[:, -3:].flatten(1).double(), made.matrix.double(), made.bias.double())
        torch.testing.assert_close(state.step(x, rows).double(), F.glu(expected, dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "kernel", "precision", "faster"),
    [(512, 3, "float32", True), (511, 3, "float32", False), (512, 5, "float32", False), (512, 3, "int8", False)],
)
def test_when_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, width: int, kernel: int, precision: str, faster: bool
) -> None:
    monkeypatch.setitem(PRECISIONS, precision, (PRECISIONS[precision][0], lambda: True))
    with PackedWeightCache(precision).for_batch() as batch:
        assert pairs_are_faster(torch.zeros(1), kernel, width, batch) is faster
    assert not pairs_are_faster(torch.zeros(1), kernel, width, None)
