"""A causal convolution step by step against its history, which is simply kept and re-ordered at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from fairseq_plugins.backends.cpu import winograd
from fairseq_plugins.backends.cpu.convolution import lay_out_, step_in_pairs
from fairseq_plugins.backends.cpu.packing import Packing, map_of
from fairseq_plugins.backends.cpu.products import has_onednn
from fairseq_plugins.models.convs2s.stepwise import StepConvolution
from fairseq_plugins.nn.decoder_state import RowOrder
from fairseq_plugins.nn.gated_convolution import GatedConvolution
from fairseq_plugins.nn.weight_norm import without_weight_norm
from tests.nn.test_decoder_state import decodings
from tests.operators import Operators

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch cannot pack")


def convolution(width: int, kernel: int = 3) -> GatedConvolution:
    torch.manual_seed(1)
    made = without_weight_norm(GatedConvolution(width, width, kernel, causal=True))
    made.bias.normal_()
    lay_out_(made)
    return made


def step_convolution(made: GatedConvolution, rows: int) -> StepConvolution:
    kernel, dim, _ = made.weight.shape
    plain = StepConvolution(map_of(made.matrix, made.bias, rows), made.weight.new_zeros(rows, (kernel - 1) * dim))
    return step_in_pairs(made, rows) or plain


@settings(deadline=None, max_examples=200)
@given(decoding=decodings())
@torch.no_grad()
def test_steps_are_the_convolution_of_each_history(decoding: tuple[int, int, int, list[list[torch.Tensor]]]) -> None:
    sentences, beam, kernel, steps = decoding
    made = convolution(24, kernel)
    history = torch.zeros(sentences * beam, kernel - 1, 24)
    order = RowOrder(sentences * beam, beam)
    with pytest.MonkeyPatch.context() as patch, Packing().for_batch():
        patch.setattr(winograd, "NARROWEST_PACKED", 24)
        state = step_convolution(made, sentences * beam)
        for orders in steps:
            for new_order in orders:
                order.reorder(new_order)
                history = history[new_order]
            rows, _ = order.take_pending()
            x = torch.randn(history.size(0), 24)
            history = torch.cat([history, x.unsqueeze(1)], dim=1)
            window = history[:, -kernel:].flatten(1)
            expected = F.linear(window.double(), made.matrix.double(), made.bias.double())
            torch.testing.assert_close(state.convolve(x, rows).double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_may_begin_as_one_for_each_sentence() -> None:
    made, first, second = convolution(512), torch.randn(2, 512), torch.randn(6, 512)
    with Packing().for_batch():
        state = step_convolution(made, 6)
    state.step(first, torch.tensor([0, 3]))
    actual = state.convolve(second, torch.tensor([0, 0, 0, 1, 1, 1]))
    window = torch.cat([torch.zeros(6, 512), first.repeat_interleave(3, dim=0), second], dim=1)
    torch.testing.assert_close(actual, F.linear(window, made.matrix, made.bias), rtol=1e-4, atol=1e-5)


# Whether weights are kept, the layer's width and kernel, and products of four steps.
CASES = {
    "in pairs": (True, 512, 3, [3, 1, 3, 1]),
    "narrow": (True, 511, 3, [1, 1, 1, 1]),
    "kernel": (True, 512, 4, [1, 1, 1, 1]),
    "for one batch": (False, 512, 3, [1, 1, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_two_steps_need_four_products(case: str) -> None:
    kept, width, kernel, expected = CASES[case]
    made, products = convolution(width, kernel), []
    with Packing().for_batch() if kept else torch.no_grad():
        state = step_convolution(made, 5)
    for _ in range(4):
        with Operators() as operators:
            state.step(torch.zeros(5, width), None)
        products.append(operators.count("mkldnn._linear_pointwise"))
    assert products == expected
